"""The token grid at run time: which height and width a site's tokens have in *this* forward pass.

A :class:`GridRecorder` hooks the module that makes the grid (usually the patch embedding's convolution) and writes
down the size it saw; a :class:`SiteLayout` reads it when its site runs and checks it against the number of tokens.
Both share one :class:`GridState` a model.  Three things could make a recorded grid stale, and are handled: another
thread runs the model at another size (sizes are kept by thread), gradient checkpointing runs a block again during
backward (the size is kept with the checkpoint's frame), and a module is called past its model's forward (the number
of tokens disagrees, which is an error, never a guess).
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .capture import packed
from .errors import LayoutError

Grid = tuple[int, ...]


class GridCell:
    """What one source last said.  An object of its own, so that compiled code can write it without reading others.

    ``shape``: the grid as the shape of a tensor without data, where it was read from numbers.  Compiled code can't
    read those again; sizes of tensors become dynamic, while every other number of an object means a compile.
    """

    def __init__(self) -> None:
        self.grid: Grid | None = None
        self.shape: Tensor | None = None


class GridState:
    """What the grid sources of one model last said.

    A pickle starts empty.  A copy too, but until a recorder of its own says something it asks the state it was copied
    from: where only a site was copied (peft trains such copies), the recorders are still those of the original.
    """

    def __init__(self, sources: Sequence[str] = ()) -> None:
        self.cells: dict[str, GridCell] = {source: GridCell() for source in sources}
        self.override: Grid | None = None
        self._by_thread: dict[tuple[int, str], Grid] = {}
        self._frames: weakref.WeakKeyDictionary[Any, dict[str, Grid]] = weakref.WeakKeyDictionary()
        self._met: dict[str, set[Grid]] = {}
        self._origin: GridState | None = None

    def know(self, source: str) -> None:
        """Make a place for what ``source`` will say."""
        self.cells.setdefault(source, GridCell())

    def __deepcopy__(self, memo: dict) -> GridState:
        twin = GridState(list(self.cells))
        spoken = any(cell.grid is not None for cell in self.cells.values())
        twin._origin = self if spoken or self._origin is None else self._origin
        return twin

    def record(self, source: str, grid: Grid) -> None:
        self.cells[source].grid = grid
        if not torch.compiler.is_compiling():
            self._by_thread[(threading.get_ident(), source)] = grid
            self._met.setdefault(source, set()).add(grid)

    def record_read(self, source: str, grid: Grid) -> None:
        """``grid`` was read from numbers."""
        self.record(source, grid)
        self.cells[source].shape = torch.empty(*grid, 0)

    def current(self, source: str) -> Grid | None:
        """The grid of this forward pass (or of the one that a checkpoint is running again)."""
        cell = self.cells[source]
        if self._origin is not None and cell.grid is None:
            return self._origin.current(source)
        if torch.compiler.is_compiling():
            return tuple(cell.shape.shape[:-1]) if cell.shape is not None else cell.grid
        grid = self._by_thread.get((threading.get_ident(), source), cell.grid)
        frame = _checkpoint_frame()
        if frame is not None:
            kept = self._frames.setdefault(frame, {})
            return kept.setdefault(source, grid) if grid is not None else kept.get(source)
        if torch._C._current_graph_task_id() != -1 and grid is not None:
            same = {g for g in self._met.get(source, ()) if math.prod(g) == math.prod(grid)}
            if len(same) > 1:
                raise LayoutError(
                    f"reentrant gradient checkpointing runs a block again in backward, and {source} has made the grids "
                    f"{sorted(same)} of as many tokens: use use_reentrant=False, or t5fx.grid(model, (height, width))"
                )
        return grid

    def __getstate__(self) -> dict[str, Any]:
        return {"sources": list(self.cells)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["sources"])  # type: ignore[misc]


def _checkpoint_frame() -> Any:
    """The frame of the non-reentrant checkpoint that is running (first time or again), if there is one.

    ``torch.utils.checkpoint`` keeps it in the closure of its saved-tensor hooks: in forward the frame itself, in
    recomputation a weak reference to the same one.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return None
    pack = hooks[0]
    pack = getattr(pack, "_torchdynamo_orig_callable", pack)  # the one of recomputation is hidden from Dynamo
    for cell in getattr(pack, "__closure__", None) or ():
        content = cell.cell_contents
        content = content() if isinstance(content, weakref.ref) else content
        if type(content).__name__ == "_CheckpointFrame":
            return content
    return None


class GridRecorder:
    """A forward hook (or forward pre-hook) that notes the sizes of some axes of a tensor."""

    def __init__(self, state: GridState, source: str, leaf: int, dims: Sequence[int], before: bool) -> None:
        self.state, self.source, self.leaf, self.dims, self.before = state, source, leaf, tuple(dims), before
        state.know(source)

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> None:
        # A forward hook gets (module, args, output), a pre-hook with keywords (module, args, kwargs).
        tree = (args, rest[-1]) if self.before else rest[-1]
        if not isinstance(tree, Tensor):
            tree = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)][self.leaf]
        self.state.record(self.source, tuple(tree.shape[d] for d in self.dims))


class PackedRecorder(GridRecorder):
    """A forward pre-hook of the model that notes what one of its inputs says of the grid (packed latents)."""

    def __init__(self, state: GridState, source: str, path: str) -> None:
        super().__init__(state, source, 0, (), True)
        self.path = path

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if torch.compiler.is_compiling():
            return  # reading numbers would break the graph: the grid of the last call, or t5fx.grid, holds
        grid = packed.read(module, args, rest[-1], self.path)
        if grid is not None:
            self.state.record_read(self.source, grid)


class SiteLayout:
    """Answers, for one site, where the grid lies among ``n`` tokens.

    Args:
        site: the site's name, for messages.
        state: shared by all sites of the model.
        source: name of the grid source to ask, or None where there is none.
        grid: the grid of the example inputs, or the one the user gave; None for "a square".
        prefix, suffix: counts of tokens before and after; at most one may be None: whatever is left.
    """

    def __init__(
        self,
        site: str,
        state: GridState,
        *,
        source: str | None = None,
        grid: Grid | None = None,
        prefix: int | None = 0,
        suffix: int | None = 0,
    ) -> None:
        self.site, self.state, self.source = site, state, source
        self.grid, self.prefix, self.suffix = grid, prefix, suffix
        if source is not None:
            state.know(source)

    def resolve(self, tokens: int) -> tuple[int, list[int]]:
        """``(prefix, grid)`` for a sequence of ``tokens`` tokens.

        Raises:
            LayoutError: the known grid does not fit the tokens; the message says what to call.
        """
        grid = self.state.override
        if grid is None and self.source is not None:
            grid = self.state.current(self.source)
        if grid is None:
            grid = self.grid if self.grid is not None else self._square(tokens)
        cells = math.prod(grid)
        prefix = tokens - cells - (self.suffix or 0) if self.prefix is None else self.prefix
        suffix = tokens - cells - prefix if self.suffix is None else self.suffix
        if prefix < 0 or suffix < 0 or prefix + cells + suffix != tokens:
            self._fail(tokens, grid)
        return prefix, list(grid)

    def _square(self, tokens: int) -> Grid:
        cells = tokens - (self.prefix or 0) - (self.suffix or 0)
        side = math.isqrt(max(int(cells), 0))
        if side * side != cells:
            self._fail(tokens, None)
        return (side, side)

    def _fail(self, tokens: int, grid: Grid | None) -> None:
        extra = [f"{n} {what}" for n, what in ((self.prefix, "prefix"), (self.suffix, "suffix")) if n]
        with_extra = f" with {' and '.join(extra)} tokens" if extra else ""
        if grid is None:
            known = f"they are assumed to be a square grid{with_extra}, which they are not"
        else:
            shape = "x".join(str(size) for size in grid)
            origin = f" of {self.source}" if self.source is not None and self.state.override is None else ""
            known = f"the grid{origin} is {shape}{with_extra}"
        raise LayoutError(
            f"site {self.site!r} got {tokens} tokens, but {known}. Run the model through its own forward, or say the "
            "grid: `with t5fx.grid(model, (height, width)): ...`"
        )

    def to_dict(self) -> dict[str, Any]:
        grid = list(self.grid) if self.grid is not None else None
        return {"source": self.source, "grid": grid, "prefix": self.prefix, "suffix": self.suffix}

    def __repr__(self) -> str:
        where = self.source or ("fixed" if self.grid is not None else "square")
        return f"SiteLayout(prefix={self.prefix}, grid={self.grid}, suffix={self.suffix}, from {where})"


@contextlib.contextmanager
def grid(model: nn.Module, sizes: Sequence[int]) -> Iterator[None]:
    """Inside, every converted site of ``model`` takes its grid to be ``sizes``: (height, width) or (frames, h, w).

    For calls that go past the module which makes the grid, such as running a model's blocks by hand.

    Raises:
        LayoutError: ``model`` holds no converted site with a grid.
    """
    states = {
        id(s): s
        for m in model.modules()
        if isinstance(s := getattr(getattr(m, "layout", None), "state", None), GridState)
    }
    if not states:
        raise LayoutError(
            f"{type(model).__name__} holds no linearized site with a token grid: call t5fx.linearize first"
        )
    before = {key: state.override for key, state in states.items()}
    for state in states.values():
        state.override = tuple(int(size) for size in sizes)
    try:
        yield
    finally:
        for key, state in states.items():
            state.override = before[key]
