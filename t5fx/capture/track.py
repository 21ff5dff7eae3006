"""Carry axis provenance (:mod:`t5fx.capture.axes`) through a dry run.

:class:`AxisTracker` is a ``TorchDispatchMode``: it sits above FakeTensorMode (or above a real run) and, for each
ATen operator, works out what the axes of the result consist of.  An operator without a rule gives unknown axes;
nothing is guessed.  It also recognises written-out attention: a product of two activations (scores), through a
softmax (probabilities), multiplied with a third activation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from .axes import INDEX, INPUT, OTHER, PARAM, SPATIAL, Algebra, Axis, rank_of
from .constants import Constants

aten = torch.ops.aten

_SAME = {
    aten.clone, aten.contiguous, aten._to_copy, aten.detach, aten.alias, aten.lift_fresh, aten.lift_fresh_copy,
    aten.native_layer_norm, aten.native_group_norm, aten.native_batch_norm, aten._native_batch_norm_legit_no_training,
    aten._softmax, aten._safe_softmax, aten._log_softmax, aten.native_dropout, aten.cumsum, aten._fused_rms_norm,
    aten.copy, aten.copy_, aten.fill, aten.zeros_like, aten.empty_like, aten.bernoulli,
    aten.cudnn_batch_norm, aten._batch_norm_with_update, aten.native_batch_norm_backward,
}  # fmt: skip
_VIEW = {aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.view_copy, aten.unflatten, aten.flatten}
_SPATIAL_OPS = {
    aten.convolution, aten._convolution, aten.avg_pool2d, aten.avg_pool3d, aten.max_pool2d_with_indices,
    aten._adaptive_avg_pool2d, aten.adaptive_avg_pool2d, aten.upsample_bilinear2d, aten.upsample_bicubic2d,
    aten.upsample_nearest2d, aten._upsample_bicubic2d_aa, aten._upsample_bilinear2d_aa, aten._upsample_nearest_exact2d,
    aten.upsample_nearest3d, aten.mkldnn_convolution, aten.pixel_unshuffle,
}  # fmt: skip
_REORDER = {aten.flip, aten.sort, aten.gather, aten.scatter, aten.topk}
SCORES, PROBABILITIES = "scores", "probabilities"
_THROUGH = (
    _SAME
    | _VIEW
    | {aten.expand, aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze, aten.masked_fill, aten.where, aten.cat}
)


class AxisTracker(TorchDispatchMode):
    """Track axes below this mode; read them with :meth:`axes`.

    Args:
        on_written: called with ``(query_like, key_like, value, out)`` when written-out attention is met; the
            first two are the operands of the score product.
    """

    def __init__(self, on_written: Callable[..., None] | None = None) -> None:
        super().__init__()
        self.algebra = Algebra()
        self._axes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._stage: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._on_written = on_written
        self._quiet = 0
        self.constants = Constants()
        self._maps: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.maps_used: set[str] = set()

    # -- reading and writing -----------------------------------------------------------------------------

    def axes(self, tensor: Tensor) -> list[Axis]:
        """What each axis of ``tensor`` consists of.  A tensor nobody computed is a parameter or a constant."""
        known = self._axes.get(tensor)
        if known is None or len(known) != tensor.dim():
            known = self.algebra.fresh(tensor.shape, PARAM)
            self._axes[tensor] = known
        return known

    def put(self, tensor: Tensor, axes: list[Axis]) -> None:
        self._axes[tensor] = list(axes)

    def put_input(self, tensor: Tensor, label: str) -> None:
        """Name the axes of a model input: an image or video has a batch, channels and spatial axes."""
        floating = tensor.is_floating_point()
        axes = []
        for i, size in enumerate(tensor.shape):
            origin = INDEX if not floating else SPATIAL if tensor.dim() in (4, 5) and i >= 2 else INPUT
            axes.append(self.algebra.new(size, origin, f"{label}.{i}:"))
        self.put(tensor, axes)

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """No written-out attention is reported inside (it belongs to a site that is known already)."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def left(self, owner: str, tensors: list[Tensor]) -> None:
        """``owner`` returned these tensors: from now on, whoever uses an attention map among them is noted."""
        for tensor in tensors:
            state = self._stage.get(tensor)
            if state is not None and state[0] == PROBABILITIES:
                self._maps.setdefault(tensor, owner)

    def used(self, tensors: list[Tensor]) -> None:
        """Note the owners whose attention map is among these tensors."""
        if len(self._maps):
            self.maps_used.update(self._maps[t] for t in tensors if t in self._maps)

    # -- the rules ---------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        tensors = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        results = [o for o in torch.utils._pytree.tree_leaves(out) if isinstance(o, Tensor)]
        self.used(tensors)
        if not results:
            return out
        for i, result in enumerate(results):
            axes = self._rule(func, packet, args, kwargs, tensors, result, i)
            if axes is None or len(axes) != result.dim():
                rank = max((rank_of(a) for t in tensors for a in self.axes(t)), default=PARAM)
                axes = self.algebra.fresh(result.shape, PARAM if rank == PARAM else OTHER)
            self.put(result, axes)
        self.constants.follow(func, args, kwargs, results[0])
        self._attention(func, packet, args, tensors, results[0])
        return out

    def _rule(self, func, packet, args, kwargs, tensors, result, i) -> list[Axis] | None:
        if not tensors:
            return self.algebra.fresh(result.shape, PARAM)
        first = tensors[0]
        axes = self.axes(first)
        if packet in _VIEW:
            return self.algebra.regroup(axes, result.shape)
        if packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm):
            left, right = tensors[-2:]
            return [*self.axes(left)[:-1], self.axes(right)[-1]]
        if packet is aten.embedding:
            return [*self.axes(tensors[1]), self.axes(tensors[0])[-1]]
        if packet in _SPATIAL_OPS:
            return self._spatial(axes, first, result)
        if packet is aten.roll and len(args) > 2 and args[2]:
            rolled = list(axes)
            for shift, dim in zip(args[1], args[2], strict=True):
                rolled[dim % first.dim()] = self.algebra.roll(rolled[dim % first.dim()], shift)
            return rolled
        if packet is aten.constant_pad_nd:
            amounts = list(args[1]) + [0] * (2 * first.dim() - len(args[1]))
            pairs = list(zip(amounts[::2], amounts[1::2], strict=True))[::-1]
            return [self.algebra.pad(axis, *pair) for axis, pair in zip(axes, pairs, strict=True)]
        if packet in _REORDER:
            return [a if s == 1 else self.algebra.new(s, OTHER) for a, s in zip(axes, result.shape, strict=False)]
        if packet is aten.cat:
            return self._cat(args, result)
        if packet is aten.stack:
            dim = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % result.dim()
            return [*axes[:dim], self.algebra.new(result.shape[dim], OTHER), *axes[dim:]]
        if packet is aten.expand:
            lead = result.dim() - first.dim()
            origin = PARAM if all(rank_of(a) == PARAM for a in axes) else OTHER
            return [
                axes[j - lead] if j >= lead and first.shape[j - lead] == size else self.algebra.new(size, origin)
                for j, size in enumerate(result.shape)
            ]
        moved = self._moved(packet, args, kwargs, axes, first, result, i)
        if moved is not None:
            return moved
        if torch.Tag.pointwise in func.tags or packet in (aten.where, aten.masked_fill, aten.add_, aten.mul_):
            return self._broadcast(tensors, result)
        if packet in _SAME and result.dim() == first.dim():
            kept = zip(axes, first.shape, result.shape, strict=True)
            return [a if old == new else self.algebra.new(new, OTHER) for a, old, new in kept]
        return self._reduced(func, axes, first, result)

    def _moved(self, packet, args, kwargs, axes, first, result, i) -> list[Axis] | None:
        """Operators that move, drop, add or cut axes."""
        n = first.dim()
        name = packet.__name__.split(".")[-1]
        rest = args[1:]
        if name in ("transpose", "transpose_", "swapaxes"):
            a, b = (d % n for d in rest[:2])
            axes = list(axes)
            axes[a], axes[b] = axes[b], axes[a]
            return axes
        if name in ("permute", "permute_copy"):
            return [axes[d % n] for d in rest[0]]
        if name in ("t", "numpy_T"):
            return list(axes)[::-1]
        if name == "unsqueeze":
            dim = rest[0] % (n + 1)
            return [*axes[:dim], self.algebra.new(1, PARAM), *axes[dim:]]
        if name == "squeeze":
            if not rest:
                return [a for a, s in zip(axes, first.shape, strict=True) if s != 1]
            dims = {d % n for d in ([rest[0]] if isinstance(rest[0], int) else rest[0])}
            return [a for j, a in enumerate(axes) if not (j in dims and first.shape[j] == 1)]
        if name in ("select", "unbind"):
            dim = (rest[0] if rest else kwargs.get("dim", 0)) % n
            return [*axes[:dim], *axes[dim + 1 :]]
        if name == "slice":
            dim = (rest[0] if rest else 0) % n
            length, whole = result.shape[dim], first.shape[dim]
            start = rest[1] if len(rest) > 1 and rest[1] is not None else 0
            start = max(0, start + whole) if start < 0 else min(start, whole)
            step = rest[3] if len(rest) > 3 else 1
            return [*axes[:dim], self.algebra.cut(axes[dim], start, length, step), *axes[dim + 1 :]]
        if name in ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "split_with_sizes_copy"):
            dim = (rest[1] if len(rest) > 1 else kwargs.get("dim", 0)) % n
            sizes = rest[0]
            length = result.shape[dim]
            if isinstance(sizes, int):
                start = sizes * i if name.endswith("split") else -(-first.shape[dim] // sizes) * i
            else:
                start = sum(sizes[:i])
            return [*axes[:dim], self.algebra.cut(axes[dim], start, length), *axes[dim + 1 :]]
        return None

    def _spatial(self, axes, first: Tensor, result: Tensor) -> list[Axis]:
        """Convolution, pooling, resizing: positions stay where the size stays; else there is a new, coarser grid."""
        if first.dim() != result.dim():
            return self.algebra.fresh(result.shape)
        out = [axes[0], self.algebra.new(result.shape[1], PARAM if all(rank_of(a) == PARAM for a in axes) else OTHER)]
        for axis, old, new in zip(axes[2:], first.shape[2:], result.shape[2:], strict=True):
            out.append(
                axis if old == new else self.algebra.new(new, PARAM if rank_of(axis) == PARAM else SPATIAL, "grid")
            )
        return out

    def _cat(self, args, result: Tensor) -> list[Axis]:
        pieces = [t for t in args[0] if t.numel() or t.dim() == result.dim()]
        dim = (args[1] if len(args) > 1 else 0) % result.dim()
        axes = []
        for j in range(result.dim()):
            columns = [self.axes(t)[j] for t in pieces]
            axes.append(self.algebra.join(columns) if j == dim else max(columns, key=rank_of))
        return axes

    def _broadcast(self, tensors, result: Tensor) -> list[Axis]:
        axes = []
        for j in range(1, result.dim() + 1):
            size = result.shape[-j]
            columns = [self.axes(t)[-j] for t in tensors if t.dim() >= j and t.shape[-j] == size]
            axes.append(max(columns, key=rank_of) if columns else self.algebra.new(size, OTHER))
        return axes[::-1]

    def _reduced(self, func, axes, first: Tensor, result: Tensor) -> list[Axis] | None:
        """A reduction that keeps its axes at size 1; or one operator of the same shape that acts on the last axis."""
        if result.dim() != first.dim() or torch.Tag.reduction not in func.tags:
            return None
        kept = zip(axes, first.shape, result.shape, strict=True)
        return [a if old == new else self.algebra.new(new, PARAM) for a, old, new in kept]

    def _attention(self, func, packet, args, tensors, result: Tensor) -> None:
        if packet in (aten.bmm, aten.baddbmm):
            left, right = tensors[-2:]
            state = self._stage.get(left)
            if state is not None and state[0] == PROBABILITIES:
                if not self._quiet and self._on_written is not None:
                    self._on_written(*state[1:], right, result)
            elif min(max(map(rank_of, self.axes(t)), default=PARAM) for t in (left, right)) > PARAM:
                self._stage[result] = (SCORES, left, right)
            return
        for tensor in tensors:
            state = self._stage.get(tensor)
            if state is None:
                continue
            if packet in (aten._softmax, aten._safe_softmax):
                self._stage[result] = (PROBABILITIES, *state[1:])
            elif packet in _THROUGH or torch.Tag.pointwise in func.tags:
                self._stage[result] = state
            elif packet in (aten.mm, aten.addmm, aten.convolution) and self._still_a_map(state, result):
                self._stage[result] = state  # heads are mixed
            return

    def _still_a_map(self, state: tuple, result: Tensor) -> bool:
        """Whether the axes of ``result`` still hold the tokens of query and of key."""
        wanted = [*self.axes(state[1])[-2], *self.axes(state[2])[-1]]
        have = [atom for axis in self.axes(result) for atom in axis]
        return all(have.count(atom) >= wanted.count(atom) for atom in wanted)
