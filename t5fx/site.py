"""What t5fx says about one attention call: :class:`Site`, :class:`TokenLayout`, :class:`Refusal`.

A *site* is one softmax-attention call of a model.  Its *owner* is the innermost ``nn.Module`` whose forward
makes the call.  These are plain values: a selector reads them, a report prints them, a recipe stores them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .errors import LayoutError


def _whole(number: Any) -> int | None:
    """``number`` as an int (numpy's and torch's integers too), or None."""
    try:
        return operator.index(number)
    except TypeError:
        return None


KINDS = ("self", "cross", "pooling", "window", "channel", "unknown")


@dataclass(frozen=True)
class TokenLayout:
    """Which tokens of a sequence lie on a grid: ``prefix`` tokens, then the grid in raster order, then ``suffix``.

    Args:
        prefix: tokens before the grid (class, register or text tokens).
        grid: ``(height, width)``, ``(frames, height, width)`` for video, or None where there is no grid;
            then every token passes the depthwise convolutions unchanged.
        suffix: tokens after the grid.

    Raises:
        LayoutError: a count is negative or the grid does not have two or three positive sizes.
    """

    prefix: int = 0
    grid: tuple[int, ...] | None = None
    suffix: int = 0

    def __post_init__(self) -> None:
        for name in ("prefix", "suffix"):
            count = _whole(getattr(self, name))
            if count is None or count < 0:
                raise LayoutError(f"TokenLayout: {name} is a number of tokens, 0 or more, not {getattr(self, name)!r}")
            object.__setattr__(self, name, count)
        if self.grid is not None:
            grid = tuple(map(_whole, self.grid)) if isinstance(self.grid, Iterable) else ()
            if len(grid) not in (2, 3) or any(size is None or size < 1 for size in grid):
                raise LayoutError(
                    f"TokenLayout: grid must be (height, width), (frames, height, width) or None, not {self.grid!r}"
                )
            object.__setattr__(self, "grid", grid)

    @property
    def grid_tokens(self) -> int:
        """Number of tokens on the grid; 0 without one."""
        return math.prod(self.grid) if self.grid is not None else 0

    def holds(self, tokens: int) -> bool:
        """Whether a sequence of ``tokens`` tokens can have this layout."""
        rest = tokens - self.prefix - self.suffix
        return rest == self.grid_tokens if self.grid is not None else rest >= 0

    def __str__(self) -> str:
        if self.grid is None:
            return "no grid"
        parts = [str(self.prefix)] if self.prefix else []
        parts.append("x".join(map(str, self.grid)))
        parts += [str(self.suffix)] if self.suffix else []
        return " + ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "grid": list(self.grid) if self.grid else None, "suffix": self.suffix}


@dataclass(frozen=True)
class Refusal:
    """Why a site is left as it is.  ``code`` is stable and short; ``reason`` is for a person to read."""

    code: str
    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Site:
    """One attention call, as a dry run saw it.

    Attributes:
        name: the owner's qualified name, with ``:1``, ``:2``... for further calls of the same owner.
        owner: the owner's qualified name ("" is the model itself).
        index: which call of the owner this is, in order of execution.
        form: how it is written: "sdpa" (``F.scaled_dot_product_attention``), "mha"
            (``nn.MultiheadAttention``) or "written" (matmul, softmax, matmul).
        kind: "self", "cross" (keys from elsewhere), "pooling" (learned or single queries), "window" (the
            grid is cut into the batch), "channel" (attention over channels) or "unknown".
        batch, heads, queries, keys, head_dim, value_dim: sizes in the dry run.
        mask: "none", "key padding" (boolean, the same for all queries), "boolean", "float" or "causal".
        layout: the token layout of the keys in the dry run, or None where it is not known.
        layout_from: in words, where the layout comes from.
        block, block_index, blocks: the repeated ancestor that holds the site, its index among the blocks
            with a convertible site (-1 if the site's block has none), and how many such blocks there are.
        softmax_flops, ttt_flops, break_even_tokens: the cost model's figures, see :mod:`t5fx.cost`.
        refusal: why the site can't be converted; None where it can.
        selected: whether it was converted (only in the report of a linearized model).
        notes: what a user should know, such as a dropped attention dropout.
    """

    name: str
    owner: str
    index: int
    form: str
    kind: str
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    mask: str = "none"
    layout: TokenLayout | None = None
    layout_from: str = ""
    block: str = ""
    block_index: int = -1
    blocks: int = 0
    softmax_flops: int = 0
    ttt_flops: int = 0
    break_even_tokens: int = 0
    refusal: Refusal | None = None
    selected: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def tokens(self) -> int:
        """Number of key tokens: what the attention reads."""
        return self.keys

    @property
    def convertible(self) -> bool:
        return self.refusal is None

    def replace(self, **changes: Any) -> Site:
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; the keys are this class's attributes, plus ``tokens`` and ``convert``."""
        return {
            "name": self.name,
            "owner": self.owner,
            "index": self.index,
            "block": self.block,
            "block_index": self.block_index,
            "blocks": self.blocks,
            "kind": self.kind,
            "form": self.form,
            "tokens": self.tokens,
            "queries": self.queries,
            "keys": self.keys,
            "batch": self.batch,
            "layout": self.layout.to_dict() if self.layout else None,
            "layout_from": self.layout_from,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "mask": self.mask,
            "softmax_flops": self.softmax_flops,
            "ttt_flops": self.ttt_flops,
            "break_even_tokens": self.break_even_tokens,
            "convert": self.convertible,
            "refusal": {"code": self.refusal.code, "reason": self.refusal.reason} if self.refusal else None,
            "selected": self.selected,
            "notes": list(self.notes),
        }
