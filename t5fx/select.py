"""Which sites to convert.  A selector is any ``Callable[[Site], bool]``; these are the usual ones.

    t5fx.every_other                                     the blocks 1, 3, 5, ...
    t5fx.last(12) & t5fx.min_tokens(1024)                combine with & | ~
    t5fx.names("blocks.*") & ~t5fx.names("blocks.0.*")   by name
    t5fx.easiest(0.5, t5fx.sensitivity(model, batches))  by measurement
    lambda site: site.head_dim == 64                     or say it yourself

A selector only ever chooses among sites that can be converted.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import SelectionError
from .site import Site


class Selector:
    """A predicate on sites that combines with ``&``, ``|`` and ``~``.

    Args:
        accept: the predicate.
        words: how it prints.
        check: called with all sites before the choice is made; may raise.
    """

    def __init__(
        self,
        accept: Callable[[Site], bool],
        words: str,
        check: Callable[[Sequence[Site]], None] | None = None,
    ) -> None:
        self._accept, self.words, self._check = accept, words, check

    def __call__(self, site: Site) -> bool:
        return bool(self._accept(site))

    def check(self, sites: Sequence[Site]) -> None:
        if self._check is not None:
            self._check(sites)

    def __and__(self, other: Any) -> Selector:
        return _combine(self, _as_selector(other), "&", all)

    def __or__(self, other: Any) -> Selector:
        return _combine(self, _as_selector(other), "|", any)

    def __rand__(self, other: Any) -> Selector:
        return _as_selector(other) & self

    def __ror__(self, other: Any) -> Selector:
        return _as_selector(other) | self

    def __invert__(self) -> Selector:
        return Selector(lambda site: not self(site), f"~{self.words}", self._check)

    def __repr__(self) -> str:
        return self.words


def _as_selector(select: Any) -> Selector:
    if isinstance(select, Selector):
        return select
    if isinstance(select, str):
        return names(select)
    if callable(select):
        return Selector(select, getattr(select, "__name__", repr(select)))
    raise SelectionError(
        f"select must be a selector or a callable from t5fx.Site to bool, not {type(select).__name__}: "
        "t5fx.every_other, t5fx.names('blocks.*'), lambda site: site.tokens > 1000"
    )


def _combine(left: Selector, right: Selector, sign: str, how: Callable) -> Selector:
    def check(sites: Sequence[Site]) -> None:
        left.check(sites)
        right.check(sites)

    return Selector(lambda site: how((left(site), right(site))), f"({left} {sign} {right})", check)


def _count(name: str, n: Any, least: int) -> int:
    if not isinstance(n, int) or isinstance(n, bool) or n < least:
        raise SelectionError(f"{name} takes a whole number of at least {least}, not {n!r}")
    return n


everything = Selector(lambda site: True, "everything")
"""All sites that can be converted."""

every_other = Selector(lambda site: site.block_index >= 0 and site.block_index % 2 == 1, "every_other")
"""The blocks 1, 3, 5, ... (counted from 0 among blocks that hold a convertible site), as the papers convert half."""

cheaper = Selector(lambda site: site.ttt_flops < site.softmax_flops, "cheaper")
"""Only sites where, at the example's size, TTT needs fewer FLOPs than softmax attention (:mod:`t5fx.cost`)."""


def every(n: int, start: int = 0) -> Selector:
    """The blocks ``start``, ``start + n``, ``start + 2 n``, ..."""
    _count("every", n, 1)
    _count("every", start, 0)
    return Selector(lambda s: s.block_index >= start and (s.block_index - start) % n == 0, f"every({n}, {start})")


def first(n: int) -> Selector:
    """The first ``n`` blocks."""
    _count("first", n, 1)
    return Selector(lambda site: 0 <= site.block_index < n, f"first({n})")


def last(n: int) -> Selector:
    """The last ``n`` blocks."""
    _count("last", n, 1)
    return Selector(lambda site: site.block_index >= max(site.blocks - n, 0), f"last({n})")


def fraction(p: float) -> Selector:
    """A share ``p`` (0 to 1) of the blocks, spread evenly; ``fraction(0.5)`` of an even number is ``every_other``."""
    if not isinstance(p, (int, float)) or not 0 < p <= 1:
        raise SelectionError(f"fraction takes a share above 0 and at most 1, not {p!r}")

    def accept(site: Site) -> bool:
        chosen = round(p * site.blocks)  # block i is chosen where the running share passes a whole number
        i, n = site.block_index, site.blocks
        return i >= 0 and (i + 1) * chosen // n > i * chosen // n

    return Selector(accept, f"fraction({p})")


def min_tokens(n: int) -> Selector:
    """Sites whose attention reads at least ``n`` tokens in the example."""
    _count("min_tokens", n, 1)
    return Selector(lambda site: site.tokens >= n, f"min_tokens({n})")


def names(*patterns: str | re.Pattern[str]) -> Selector:
    """Sites whose name, owner or block matches one of the globs (strings) or regular expressions (``re.compile``).

    Raises (when used):
        SelectionError: a pattern matches no site of the model; the message lists the sites there are.
    """
    if not patterns:
        raise SelectionError("names needs at least one pattern, such as names('blocks.*')")
    for pattern in patterns:
        if not isinstance(pattern, (str, re.Pattern)):
            raise SelectionError(f"names takes globs (strings) or compiled regular expressions, not {pattern!r}")

    def matches(pattern: str | re.Pattern[str], site: Site) -> bool:
        for name in (site.name, site.owner, site.block):
            if fnmatch.fnmatchcase(name, pattern) if isinstance(pattern, str) else pattern.search(name):
                return True
        return False

    def check(sites: Sequence[Site]) -> None:
        for pattern in patterns:
            if not any(matches(pattern, site) for site in sites):
                shown = pattern if isinstance(pattern, str) else f"/{pattern.pattern}/"
                raise SelectionError(f"names: {shown!r} matches no site. {list_sites(sites)}")

    words = ", ".join(repr(p) if isinstance(p, str) else f"/{p.pattern}/" for p in patterns)
    return Selector(lambda site: any(matches(p, site) for p in patterns), f"names({words})", check)


class _Measured(Selector):
    """A selector that weighs all sites against each other, when it is asked about a model."""

    def __init__(self, pick: Callable[[Sequence[Site]], set[str]], scores: Mapping[str, float], words: str) -> None:
        for name, score in scores.items():
            if not isinstance(score, (int, float)) or not math.isfinite(score) or score < 0:
                raise SelectionError(
                    f"{words}: the score of {name!r} must be a finite number of at least 0, not {score!r}"
                )
        self._pick, self._scores = pick, dict(scores)
        self._chosen: set[str] | None = None
        super().__init__(self._is_chosen, words, self._choose)

    def _choose(self, sites: Sequence[Site]) -> None:
        candidates = [site for site in sites if site.convertible]
        missing = [site.name for site in candidates if site.name not in self._scores]
        if missing:
            raise SelectionError(
                f"{self.words}: there is no score for {missing[0]!r}; the scores are of {list(self._scores)}. Measure "
                "this model: t5fx.sensitivity(model, batches)"
            )
        self._chosen = self._pick(sites)

    def _is_chosen(self, site: Site) -> bool:
        if self._chosen is None:
            raise SelectionError(
                f"{self.words} weighs all sites of a model: pass it as select=, it can't judge one alone"
            )
        return site.name in self._chosen


def easiest(fraction: float, scores: Mapping[str, float]) -> Selector:
    """The share ``fraction`` (0 to 1) of the convertible sites that suffer least, by :func:`t5fx.sensitivity`.

    Raises (also when used):
        SelectionError: a number makes no sense, or a convertible site has no score.
    """
    if not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
        raise SelectionError(f"easiest takes a share above 0 and at most 1, not {fraction!r}")

    def pick(sites: Sequence[Site]) -> set[str]:
        ranked = sorted((s for s in sites if s.convertible), key=lambda s: scores[s.name])
        return {site.name for site in ranked[: max(1, round(fraction * len(ranked)))]}

    return _Measured(pick, scores, f"easiest({fraction})")


def budget(speedup: float, scores: Mapping[str, float]) -> Selector:
    """The sites whose scores (:func:`t5fx.sensitivity`) add up to least, among all sets with a predicted ``speedup``.

    Predicted by the cost model, as in the report's totals: the FLOPs of all attention sites before over those after, at
    the sizes of the example inputs.  A site for which TTT needs more FLOPs there is never chosen.

    Raises (also when used):
        SelectionError: a number makes no sense, a convertible site has no score, or no set is that fast; the message
            says what the fastest is.
    """
    if not isinstance(speedup, (int, float)) or not (math.isfinite(speedup) and speedup > 1):
        raise SelectionError(f"budget takes a speed-up above 1, not {speedup!r}")

    def pick(sites: Sequence[Site]) -> set[str]:
        total = sum(site.softmax_flops for site in sites)
        useful = [s for s in sites if s.convertible and s.ttt_flops < s.softmax_flops]
        saved = [s.softmax_flops - s.ttt_flops for s in useful]
        needed = math.ceil(total * (1 - 1 / speedup))
        if sum(saved) < needed:
            raise SelectionError(
                f"budget({speedup}): converting all {len(useful)} sites that gain makes attention "
                f"{total / (total - sum(saved)):.2f}x faster at these sizes, by FLOPs. Ask for less, or pass larger "
                "example_inputs"
            )
        return {useful[i].name for i in lightest([scores[s.name] for s in useful], saved, needed)}

    return _Measured(pick, scores, f"budget({speedup})")


def lightest(weights: Sequence[float], gains: Sequence[int], needed: int) -> list[int]:
    """Indices of the set of least total weight whose gains reach ``needed``, which all together do.

    A knapsack, by dynamic programming over the sets that no other beats in both; exact while those are fewer than
    5,000, as they are when most sites are alike.  Of more, those with nearly equal gains are taken for one.
    """
    front: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]  # (gain, weight, indices), falling in both
    for i, (weight, gain) in enumerate(zip(weights, gains, strict=True)):
        more = [(min(g + gain, needed), w + weight, (*chosen, i)) for g, w, chosen in front]
        lightest_yet, kept = math.inf, []
        for state in sorted(front + more, key=lambda s: (-s[0], s[1], len(s[2]))):
            if state[1] < lightest_yet:
                lightest_yet = state[1]
                kept.append(state)
        front = kept if len(kept) <= 5_000 else list({s[0] * 5_000 // needed: s for s in reversed(kept)}.values())[::-1]
    return list(front[0][2])


def choose(sites: Sequence[Site], select: Any) -> list[Site]:
    """The convertible sites that ``select`` accepts.

    Raises:
        SelectionError: none is left, or a name in the selector matches nothing; the message lists the sites.
    """
    selector = _as_selector(select)
    if not sites:
        raise SelectionError("the model makes no attention call that t5fx knows, so there is nothing to convert")
    selector.check(sites)
    chosen = [site for site in sites if site.convertible and selector(site)]
    if not chosen:
        raise SelectionError(f"select={selector} chooses no site that can be converted. {list_sites(sites)}")
    return chosen


def list_sites(sites: Sequence[Site]) -> str:
    """The sites in a sentence, for messages."""
    shown = [f"{s.name} ({'convertible' if s.convertible else 'refused: ' + str(s.refusal)})" for s in sites[:40]]
    more = f" and {len(sites) - 40} more" if len(sites) > 40 else ""
    return f"The model's {len(sites)} sites: " + "; ".join(shown) + more
