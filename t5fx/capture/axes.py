"""What each axis of a tensor is made of: the provenance that tells tokens from channels and windows from grids.

Equal lengths say little (64 tokens of 64 channels are common), so a dry run carries, for every tensor, what
its axes consist of.  An axis is a product of *atoms*, outermost first, as in einops: the output of a patch
embedding is ``[batch][channel][h][w]``; ``flatten(2)`` makes ``[batch][channel][h w]``; concatenating a class
token makes one atom, *joined* from the parts ``(1)`` and ``(h w)``; a window partition splits ``h`` into
``h/7`` and ``7``.  Splitting and joining are undone when the pieces meet again, so what a site finds in the
token axis of its key still says where the grid is and who made it.

Atoms are compared by identity.  What an operator does to the axes is in :mod:`t5fx.capture.track`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

# How much an axis tells, the most telling last: when two operands are broadcast the more telling one wins.
PARAM, OTHER, INDEX, INPUT, SPATIAL = range(5)


@dataclass(eq=False)
class Atom:
    """An indivisible factor of an axis.

    ``origin`` is PARAM (comes from a parameter or a constant), OTHER (unknown), INDEX (position in an integer
    input such as token ids), INPUT (an axis of a floating-point input) or SPATIAL (a height, width or time
    axis of an image-like input, or what a convolution or pooling made of one).
    """

    size: int
    origin: int
    label: str = ""
    parts: tuple[tuple[Atom, ...], ...] = ()  # not empty: joined from these axes by torch.cat
    parent: Atom | None = None  # not None: one factor of a split atom
    siblings: tuple[Atom, ...] = field(default=(), repr=False)
    whole: tuple[Atom, ...] = ()  # not empty: a slice of this axis,
    start: int = 0  # from here on
    unrolled: Atom | None = None  # not None: this atom rolled in a circle,
    turned: int = 0  # by so much
    core: tuple[Atom, ...] = ()  # not empty: this axis padded,
    before: int = 0  # with so much before it

    def rank(self) -> int:
        return max((atom.rank() for part in self.parts for atom in part), default=self.origin)

    def root(self) -> Atom:
        return self if self.parent is None else self.parent.root()

    def __repr__(self) -> str:
        if self.parts:
            return "(" + " | ".join("·".join(map(repr, part)) or "1" for part in self.parts) + ")"
        mark = "/" if self.parent is not None else ""
        return f"{mark}{self.label or '?'}{self.size}"


Axis = tuple[Atom, ...]


def _slice_of(axis: Axis) -> Axis:
    return axis[0].whole if len(axis) == 1 else ()


def size_of(axis: Iterable[Atom]) -> int:
    return math.prod(atom.size for atom in axis)


def essential(axis: Axis) -> Axis:
    """The axis without the atoms of size 1 that an ``unsqueeze`` left in it."""
    return tuple(atom for atom in axis if atom.size != 1 or atom.rank() > OTHER) if len(axis) > 1 else axis


def rank_of(axis: Axis) -> int:
    return max((atom.rank() for atom in axis), default=PARAM)


class Algebra:
    """Makes and remembers atoms, so that the same operation on the same axis gives the same atom."""

    def __init__(self) -> None:
        self._memo: dict[tuple, object] = {}
        self._keep: list[Atom] = []  # ids are keys above, so atoms must stay alive

    def new(self, size: int, origin: int, label: str = "") -> Axis:
        atom = Atom(int(size), origin, label)
        self._keep.append(atom)
        return (atom,)

    def fresh(self, shape: Sequence[int], origin: int = OTHER, label: str = "") -> list[Axis]:
        return [self.new(size, origin, label) for size in shape]

    def split(self, atom: Atom, outer: int) -> tuple[Atom, Atom]:
        """Factor ``atom`` into an outer atom of size ``outer`` and the rest."""
        key = ("split", id(atom), outer)
        if key not in self._memo:
            pair = (
                Atom(outer, atom.rank(), atom.label, parent=atom),
                Atom(atom.size // outer, atom.rank(), atom.label, parent=atom),
            )
            for half in pair:
                half.siblings = pair
            self._keep.append(atom)
            self._memo[key] = pair
        return self._memo[key]  # type: ignore[return-value]

    def roll(self, axis: Axis, shift: int) -> Axis:
        """A single axis rolled in a circle (shifted windows); rolled back it is itself again."""
        if len(axis) != 1 or axis[0].parts or axis[0].rank() != SPATIAL:
            return self.new(size_of(axis), OTHER)
        base, turned = axis[0], shift
        if base.unrolled is not None:
            base, turned = base.unrolled, base.turned + shift
        turned %= base.size
        if turned == 0:
            return (base,)
        key = ("roll", id(base), turned)
        if key not in self._memo:
            rolled = self.new(base.size, SPATIAL, base.label)
            rolled[0].unrolled, rolled[0].turned = base, turned
            self._keep.append(base)
            self._memo[key] = rolled
        return self._memo[key]  # type: ignore[return-value]

    def pad(self, axis: Axis, before: int, after: int) -> Axis:
        """An axis with something put before and after it; cut off again it is itself."""
        if not before and not after:
            return axis
        padded = self.new(size_of(axis) + before + after, SPATIAL if rank_of(axis) == SPATIAL else OTHER)
        if before >= 0 and after >= 0:
            padded[0].core, padded[0].before = axis, before
            self._keep.extend(axis)
        return padded

    def join(self, axes: Sequence[Axis]) -> Axis:
        """The axis that ``torch.cat`` makes of ``axes``."""
        parts: list[Axis] = []
        for axis in axes:
            if len(axis) == 1 and axis[0].parts:
                parts.extend(axis[0].parts)
            elif size_of(axis):
                parts.append(axis)
        place = 0
        while place + 1 < len(parts):  # slices that follow each other are one slice, or the whole axis again
            left, right = parts[place], parts[place + 1]
            if (
                _slice_of(left)
                and _slice_of(left) == _slice_of(right)
                and left[0].start + left[0].size == right[0].start
            ):
                parts[place : place + 2] = [self.cut(left[0].whole, left[0].start, left[0].size + right[0].size)]
            else:
                place += 1
        if len(parts) == 1:
            return parts[0]
        key = ("join", *(tuple(map(id, part)) for part in parts))
        if key not in self._memo:
            atom = Atom(sum(map(size_of, parts)), OTHER, parts=tuple(parts))
            self._keep.extend(a for part in parts for a in part)
            self._memo[key] = (atom,)
        return self._memo[key]  # type: ignore[return-value]

    def cut(self, axis: Axis, start: int, length: int, step: int = 1) -> Axis:
        """The axis that slicing makes; whole parts of a joined axis keep their identity."""
        if length == size_of(axis) and step == 1:
            return axis
        if len(axis) == 1 and axis[0].core and (start, length, step) == (axis[0].before, size_of(axis[0].core), 1):
            return axis[0].core
        if step == 1 and len(axis) == 1 and axis[0].parts:
            at, chosen = 0, []
            for part in axis[0].parts:
                if start <= at and at + size_of(part) <= start + length:
                    chosen.append(part)
                at += size_of(part)
            if sum(map(size_of, chosen)) == length:
                return self.join(chosen)
        key = ("cut", *map(id, axis), start, length, step)
        if key not in self._memo:
            self._keep.extend(axis)
            cut = self.new(length, min(rank_of(axis), OTHER), "cut")
            if step == 1:
                cut[0].whole, cut[0].start = axis, start
            self._memo[key] = cut
        return self._memo[key]  # type: ignore[return-value]

    def regroup(self, axes: Sequence[Axis], shape: Sequence[int]) -> list[Axis]:
        """The axes after a ``view`` to ``shape``: the atoms, in order, are dealt out to the new axes."""
        todo = [atom for axis in axes for atom in axis][::-1]
        result: list[Axis] = []
        for place, size in enumerate(shape):
            axis: list[Atom] = []
            have = 1
            while todo and have < size:
                atom = todo.pop()
                need = size // have
                if size % have or (atom.size > need and atom.size % need) or (atom.size <= need and need % atom.size):
                    return [*result, *self.fresh(shape[place:])]  # the factors do not line up: unknown from here
                if atom.size > need:
                    atom, rest = self.split(atom, need)
                    todo.append(rest)
                axis.append(atom)
                have *= atom.size
            if have != size:
                return [*result, *self.fresh(shape[place:])]
            if not axis and todo and todo[-1].size == 1:
                axis.append(todo.pop())
            while place + 1 == len(shape) and todo and todo[-1].size == 1:  # a grid one token wide keeps its width
                axis.append(todo.pop())
            result.append(self.merge(axis))
        return result

    def merge(self, axis: Sequence[Atom]) -> Axis:
        """Undo splits whose factors are neighbours again."""
        atoms = list(axis)
        place = 0
        while place + 1 < len(atoms):
            pair = (atoms[place], atoms[place + 1])
            if pair[0].parent is not None and pair == pair[0].siblings:
                atoms[place : place + 2] = [pair[0].parent]
                place = max(place - 1, 0)
            else:
                place += 1
        return tuple(atoms)
