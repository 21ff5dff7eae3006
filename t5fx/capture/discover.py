"""Find the attention sites of a model: one dry run, nothing changed.

The model runs once on fake tensors (or as it is, on the meta device) under three observers: hooks on every
module say whose forward is running, a ``TorchFunctionMode`` sees the attention calls, and the
:class:`~t5fx.capture.track.AxisTracker` knows what the axes of query and key are made of.  Where a model branches
on data, it is run for real instead.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..errors import InputError
from ..passes.canonicalize import SDPA_FUNCTIONS, AttentionCall, bind
from ..passes.registry import FORWARDS, FUNCTIONS, in_the_open
from . import axes as ax
from . import packed
from .axes import Atom, Axis
from .dryrun import evaluating, fake_buffers, new_fake_mode, on_meta, preserved, to_fake
from .track import AxisTracker


@dataclass(frozen=True)
class GridSource:
    """Where the token grid can be read at run time: sizes of a tensor that passes through a module.

    ``side`` is "output" or "input"; ``leaf`` counts the tensors of the output, or of ``(args, kwargs)``; ``dims``
    are the axes whose sizes are the grid.  With a ``path`` the grid is what that input of the model says
    (:mod:`t5fx.capture.packed`), for the token axis of ``leaf``.
    """

    module: str
    side: str
    leaf: int = 0
    dims: tuple[int, ...] = ()
    path: str = ""


@dataclass
class Seen:
    """One attention call as the dry run saw it."""

    owner: str
    index: int
    form: str
    call: AttentionCall
    query_axes: list[Axis]
    key_axes: list[Axis]
    sources: dict[tuple[int, ...], GridSource] = field(repr=False, default_factory=dict)
    packed: dict[int, tuple[GridSource, tuple[int, ...]]] = field(repr=False, default_factory=dict)
    mask_is_uniform: bool = False
    others: list[Seen] = field(repr=False, default_factory=list)  # further calls of a module that is called again

    def source_of(self, grid: tuple[Atom, ...]) -> GridSource | None:
        return self.sources.get(tuple(map(id, grid)))


@dataclass
class Discovery:
    """What a dry run found.  ``owner_calls`` holds the arguments of each owner's calls, of fake tensors."""

    seen: list[Seen]
    owner_calls: dict[str, list[tuple[tuple, dict[str, Any]]]]
    fake_mode: FakeTensorMode
    tracker: AxisTracker
    maps_used: set[str]
    how: str


class _Observer(TorchFunctionMode):
    """Hooks for the module stack, a function mode for the calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules()}
        self.tracker = AxisTracker(on_written=self._written)
        self.stack: list[dict[str, Any]] = []
        self.seen: list[Seen] = []
        self.owner_calls: dict[str, list] = {}
        self.sources: dict[tuple[int, ...], GridSource] = {}
        self.packed: dict[int, tuple[GridSource, tuple[int, ...]]] = {}

    @contextlib.contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        name = self.names[id(module)]
        self.stack.append({"name": name, "args": args, "kwargs": kwargs, "sites": 0})
        self._note_grids(name, "input", (args, kwargs))

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        top = self.stack.pop()
        name = self.names[id(module)]
        self._note_grids(name, "output", output)
        if top["sites"]:
            self.tracker.left(name, [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)])

    def _note_grids(self, name: str, side: str, tree: Any) -> None:
        """Remember this tensor if two or three of its axes are the axes of an image or a video."""
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
        for leaf, tensor in enumerate(tensors):
            if tensor.dim() < 4:
                continue
            spatial = [(d, a[0]) for d, a in enumerate(self.tracker.axes(tensor)) if len(a) == 1 and is_spatial(a[0])]
            if len(spatial) in (2, 3):
                dims, atoms = zip(*spatial, strict=True)
                self.sources[tuple(map(id, atoms))] = GridSource(name, side, leaf, dims)
                if len(spatial) == 3:  # a video's frames, read one by one by an image model
                    self.sources[tuple(map(id, atoms[1:]))] = GridSource(name, side, leaf, dims[1:])

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in SDPA_FUNCTIONS:
            call = bind(args, kwargs)
            self._record("sdpa", call)
            with self.tracker.quiet():
                out = func(*args, **kwargs)
            self.tracker.put(out, [*self.tracker.axes(call.query)[:-1], self.tracker.axes(call.value)[-1]])
            return out
        if func is F.multi_head_attention_forward:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            heads = args[4] if len(args) > 4 else kwargs.get("num_heads", 1)
            query, key, value = (self._fold_heads(named[k], heads) for k in ("query", "key", "value"))
            mask = named.get("key_padding_mask")
            mask = mask if mask is not None else named.get("attn_mask")
            self._record("mha", AttentionCall(query, key, value, mask, is_causal=named.get("is_causal", False)))
            with self.tracker.quiet():
                return func(*args, **kwargs)
        if func in FUNCTIONS:
            with self:  # taught by passes.register: look inside
                return FUNCTIONS[func](*args, **kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _fold_heads(x: Tensor, heads: int) -> Tensor:
        """[N, B, heads * D] or [N, heads * D] -> [B, heads, N, D], as the attention inside will see it."""
        x = x.unsqueeze(1) if x.dim() == 2 else x
        return x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)

    def _written(self, query: Tensor, key_t: Tensor, value: Tensor, out: Tensor) -> None:
        key = key_t.transpose(-1, -2)
        *lead, channels, tokens = self.tracker.axes(key_t)
        self.tracker.put(key, [*lead, tokens, channels])
        self._record("written", AttentionCall(query, key, value))

    def _record(self, form: str, call: AttentionCall) -> None:
        if not self.stack:
            return
        top = self.stack[-1]
        calls = self.owner_calls.setdefault(top["name"], [])
        if top["sites"] == 0:
            calls.append((top["args"], top["kwargs"]))
        index = top["sites"]
        top["sites"] += 1
        first = next((s for s in self.seen if (s.owner, s.index) == (top["name"], index)), None)
        if first is None or len(first.others) < 64:
            query_axes = [ax.essential(axis) for axis in self.tracker.axes(call.query)]
            key_axes = [ax.essential(axis) for axis in self.tracker.axes(call.key)]
            seen = Seen(top["name"], index, form, call, query_axes, key_axes, dict(self.sources), self.packed)
            mask = call.attn_mask
            if form == "sdpa" and mask is not None and mask.dtype == torch.bool:
                between = range(1, mask.dim() - 1) if mask.dim() == 4 else range(mask.dim() - 1)
                seen.mask_is_uniform = all(self.tracker.constants.uniform(mask, d) for d in between)
            if first is None:
                self.seen.append(seen)
            else:
                first.others.append(seen)


def is_spatial(atom: Atom) -> bool:
    return not atom.parts and atom.rank() == ax.SPATIAL


def discover(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Discovery:
    """Run ``model(*args, **kwargs)`` dry and list its attention calls in order of execution.

    Raises:
        InputError: the model does not run with these inputs, pretended or real.
    """
    mode = new_fake_mode()
    meta = on_meta(model)
    errors = []
    for real in (False,) if meta else (False, True):
        try:
            return _run(model, args, kwargs, mode, real)
        except Exception as error:  # any failure of the user's model is reported with the inputs it got
            errors.append(error)
    last = errors[-1]
    raise InputError(
        f"{type(model).__name__} does not run with the example inputs {describe((args, kwargs))}: "
        f"{type(last).__name__}: {str(last).strip()[:400]}. Pass example_inputs= that model(...) accepts: a tensor, "
        "a tuple, a dict of keywords, or (args, kwargs)."
    ) from last


def _run(model: nn.Module, args: tuple, kwargs: dict[str, Any], mode: FakeTensorMode, real: bool) -> Discovery:
    observer, given = _Observer(model), (args, kwargs)
    device = torch.device("meta") if on_meta(model) else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(in_the_open())
        stack.enter_context(preserved(model))
        stack.enter_context(evaluating(model))
        for module in model.modules():
            forward = FORWARDS.get(type(module).forward)
            if forward is not None and not isinstance(module, nn.MultiheadAttention):
                module.__dict__["forward"] = types.MethodType(forward, module)
        stack.enter_context(observer.hooked(model))
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # it would run attention inside one opaque operator
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        if real:
            buffers = [(b, b.clone()) for b in model.buffers()]
            stack.callback(lambda: [b.copy_(old) for b, old in buffers])
        else:
            args, kwargs = to_fake((args, kwargs), mode, device)
            fake_buffers(model, mode)
            stack.enter_context(mode)
        stack.enter_context(observer.tracker)
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for i, leaf in enumerate(leaves):
            observer.tracker.put_input(leaf, f"input{i}")
            if leaf.is_floating_point() and leaf.dim() == 3:
                with _disable_current_modes():  # what the user gave is read, numbers and all
                    found = packed.find(model, *given, int(leaf.shape[1]))
                if found is not None:
                    atom = observer.tracker.axes(leaf)[1][0]
                    observer.packed[id(atom)] = (GridSource("", "input", path=found[0]), found[1])
        with observer:
            output = model(*args, **kwargs)
            observer.tracker.used([leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)])
    used = observer.tracker.maps_used
    return Discovery(
        observer.seen, observer.owner_calls, mode, observer.tracker, used, "real run" if real else "dry run"
    )


def describe(tree: Any) -> str:
    """Inputs in short, for a message: shapes and dtypes instead of numbers."""
    args, kwargs = tree

    def one(x: Any) -> str:
        if isinstance(x, Tensor):
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        return repr(x)[:60]

    parts = [one(a) for a in args] + [f"{k}={one(v)}" for k, v in kwargs.items()]
    return "(" + ", ".join(parts) + ")"
