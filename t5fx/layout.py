"""Find out where the token grid of a site is, from what its key's token axis is made of.

In order: what the user says, what the dry run's provenance says (a spatial grid that a module made, with the
tokens joined before and after it), a square.  The result has two halves: the :class:`~t5fx.site.TokenLayout` of the
example, for reports, and a :class:`LayoutRule` that finds the layout of any later call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from .capture import axes as ax
from .capture.axes import Axis, rank_of, size_of
from .capture.discover import GridSource, Seen, is_spatial
from .errors import LayoutError
from .grid import GridState, SiteLayout
from .site import Refusal, Site, TokenLayout

UserLayout = TokenLayout | Callable[[Site], TokenLayout | None] | None


@dataclass(frozen=True)
class LayoutRule:
    """How a site learns its layout in a later call; ``None`` counts are "whatever is left" (text of any length)."""

    source: GridSource | None
    grid: tuple[int, ...] | None
    prefix: int | None
    suffix: int | None

    def agrees(self, other: LayoutRule) -> bool:
        """Whether both find the same layout in any call."""
        same = (self.source, self.prefix, self.suffix) == (other.source, other.prefix, other.suffix)
        return same and (self.source is not None or self.grid == other.grid)

    def site_layout(self, site: str, state: GridState) -> SiteLayout:
        source = source_name(self.source) if self.source is not None else None
        return SiteLayout(site, state, source=source, grid=self.grid, prefix=self.prefix, suffix=self.suffix)


@dataclass(frozen=True)
class Found:
    """``layout`` of the example, the rule for later, and in words where both come from."""

    layout: TokenLayout
    rule: LayoutRule | None
    words: str


def source_name(source: GridSource) -> str:
    """A readable key: ``patch_embed.proj`` for an output, ``block(input)`` for an input."""
    if source.path:
        return f"input {source.path}"
    name = source.module or "model"
    suffix = "" if source.side == "output" else "(input)"
    return f"{name}{suffix}" + (f"[{source.leaf}]" if source.leaf else "")


def kind_of(seen: Seen) -> str:
    """self, cross, pooling, window, channel or unknown, from provenance; see :class:`t5fx.site.Site`."""
    query, key = seen.query_axes[-2], seen.key_axes[-2]
    lead = [atom for axis in seen.key_axes[:-2] for atom in axis]
    if rank_of(key) == ax.PARAM and rank_of(seen.key_axes[-1]) > ax.PARAM:
        return "channel"  # the tokens are where the channels should be
    if _is_window(key, lead):
        return "window"
    if query == key:
        return "self"
    if size_of(query) == 1 or rank_of(query) == ax.PARAM:
        return "pooling"
    if size_of(query) == size_of(key) and ax.OTHER in (rank_of(query), rank_of(key)):
        return "unknown"
    return "cross"


def _is_window(tokens: Axis, lead: list[ax.Atom]) -> bool:
    """Some token axis is one factor of a split whose other factor went into the batch."""
    inside = {id(a.parent) for a in tokens if a.parent is not None}
    return any(a.parent is not None and id(a.parent) in inside for a in lead)


def find(seen: Seen, site: Site, user: UserLayout) -> Found | Refusal:
    """The layout of ``site``.

    Raises:
        LayoutError: the layout that the user gave does not fit the site's tokens.
    """
    derived = _derive(seen, site)
    given = user(site) if callable(user) else user
    if given is None:
        return derived
    if not isinstance(given, TokenLayout):
        raise LayoutError(f"layout= must give a t5fx.TokenLayout or None for site {site.name!r}, not {given!r}")
    if not given.holds(site.keys):
        raise LayoutError(
            f"layout= says {given.prefix} prefix tokens, a grid of {given.grid} and {given.suffix} suffix tokens for "
            f"site {site.name!r}, which has {site.keys} tokens in the example: they must add up"
        )
    if given.grid is None:
        return Found(given, None, "given")
    # A grid that agrees with the one a module made may follow that module to other sizes.
    source = None
    if isinstance(derived, Found) and derived.rule is not None and derived.layout.grid == given.grid:
        source = derived.rule.source
    rule = LayoutRule(source, given.grid, given.prefix, given.suffix)
    return Found(given, rule, "given" + (f", follows {source_name(source)}" if source else ""))


def _derive(seen: Seen, site: Site) -> Found | Refusal:
    axis = seen.key_axes[-2]
    parts = list(axis[0].parts) if len(axis) == 1 and axis[0].parts else [axis]
    grids = [i for i, part in enumerate(parts) if _is_grid(part)]
    row = [i for i, part in enumerate(parts) if len(part) == 1 and id(part[0]) in seen.packed]
    if len(row) == 1 and not grids:
        packed, grid = seen.packed[id(parts[row[0]][0])]
        return _around(row[0], parts, grid, packed, f"grid of {source_name(packed)}")
    if len(grids) == 1:
        at = grids[0]
        grid = tuple(atom.size for atom in parts[at])
        source = seen.source_of(parts[at])
        words = f"grid of {source_name(source)}" if source else "grid of the example inputs, fixed"
        return _around(at, parts, grid, source, words)
    if len(grids) > 1:
        return _unknown(site, f"its tokens hold {len(grids)} grids")
    return _no_grid(site, axis, parts)


def _around(at: int, parts: list[Axis], grid: tuple[int, ...], source: GridSource | None, words: str) -> Found:
    """The grid is part ``at``; what is before and after it is prefix and suffix."""
    sizes = [size_of(part) for part in parts]
    layout = TokenLayout(sum(sizes[:at]), grid, sum(sizes[at + 1 :]))
    prefix, suffix = _count(parts[:at]), _count(parts[at + 1 :])
    if prefix is None and suffix is None:
        prefix = layout.prefix  # both vary: only one can be what is left
    return Found(layout, LayoutRule(source, grid, prefix, suffix), words)


def _no_grid(site: Site, axis: Axis, parts: list[Axis]) -> Found | Refusal:
    if rank_of(axis) in (ax.INDEX, ax.PARAM):
        what = "token ids" if rank_of(axis) == ax.INDEX else "learned tokens"
        return Found(TokenLayout(), None, f"no grid: {what}")
    if any(is_spatial(atom) for part in parts for atom in part):
        return Found(TokenLayout(), None, "no grid: one axis of it only")
    if rank_of(axis) == ax.OTHER:
        return _unknown(site, "its tokens come through an operator that may have reordered or dropped some")
    side = math.isqrt(site.keys)
    if len(parts) == 1 and side * side == site.keys:  # tokens just as the user passes them in
        return Found(TokenLayout(grid=(side, side)), LayoutRule(None, None, 0, 0), "assumed square")
    return _unknown(site, f"nothing says how its {site.keys} tokens lie")


def _is_grid(part: Axis) -> bool:
    return len(part) in (2, 3) and all(map(is_spatial, part))


def _count(parts: list[Axis]) -> int | None:
    """Learned tokens (class, register) are always as many; tokens that come from an input may be more next time."""
    if any(rank_of(part) != ax.PARAM for part in parts):
        return None
    return sum(map(size_of, parts))


def _unknown(site: Site, why: str) -> Refusal:
    return Refusal(
        "layout",
        f"the token grid is not known ({why}): pass layout=t5fx.TokenLayout(prefix, (height, width), suffix), "
        "or a config with dwc=None",
    )


def grid_axes(layout: TokenLayout | None) -> int:
    """How many axes the depthwise convolutions of a site have: 2, or 3 for video."""
    return len(layout.grid) if layout is not None and layout.grid is not None else 2
