"""Which axes of a tensor hold one value: for boolean masks, whose numbers a dry run does not have.

A library may spread a key-padding mask over all queries before it calls attention, [B, 1, N, N] instead of
[B, 1, 1, N].  That mask is harmless, a causal one of the same shape is not.  Masks are made of ``arange`` and
comparisons, so the numbers of tensors that depend on no input are computed for real beside the dry run, and operators
carry on along which axes their result can't vary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

aten = torch.ops.aten
_MAKERS = {aten.arange, aten.zeros, aten.ones, aten.full, aten.scalar_tensor, aten.new_ones, aten.new_zeros}
_SAME = {aten.clone, aten._to_copy, aten.detach, aten.alias}
_LARGEST = 1 << 22


class Constants:
    """Follows operators below a dispatch mode; ask :meth:`uniform`."""

    def __init__(self) -> None:
        self._real: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._axes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def uniform(self, tensor: Tensor, dim: int) -> bool:
        """Whether all slices of ``tensor`` along ``dim`` are known to be equal."""
        dim %= tensor.dim()
        if tensor.shape[dim] == 1 or tensor.stride(dim) == 0 or dim in self._axes.get(tensor, ()):
            return True
        real = self._real.get(tensor)
        if real is None:
            return False
        with _disable_current_modes():
            return bool((real == real.narrow(dim, 0, 1)).all())

    def follow(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Tensor) -> None:
        """Note what is known of ``result = func(*args, **kwargs)``."""
        packet = func.overloadpacket
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, Tensor)]
        if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
            return
        known = all(t in self._real for t in tensors) if tensors else packet in _MAKERS
        if known and result.numel() <= _LARGEST:
            self._compute(func, args, kwargs, result)
        elif packet is aten.expand:
            lead, source = result.dim() - tensors[0].dim(), tensors[0]
            self._axes[result] = {
                d
                for d in range(result.dim())
                if d < lead or source.shape[d - lead] == 1 or self.uniform(source, d - lead)
            }
        elif packet is aten.unsqueeze:
            at = args[1] % result.dim()
            old = [d for d in range(tensors[0].dim()) if self.uniform(tensors[0], d)]
            self._axes[result] = {at, *(d + (d >= at) for d in old)}
        elif torch.Tag.pointwise in func.tags or packet in _SAME:
            self._axes[result] = {d for d in range(result.dim()) if all(self._operand(t, result, d) for t in tensors)}

    def _operand(self, tensor: Tensor, result: Tensor, dim: int) -> bool:
        """Whether an operand, broadcast to ``result``, does not vary along ``dim``."""
        own = dim - (result.dim() - tensor.dim())
        return own < 0 or self.uniform(tensor, own)

    def _compute(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Tensor) -> None:
        def real(leaf: Any) -> Any:
            return self._real[leaf] if isinstance(leaf, Tensor) else leaf

        try:
            with _disable_current_modes():
                args, kwargs = tree_map(real, (args, kwargs))
                if "device" in kwargs:
                    kwargs["device"] = torch.device("cpu")
                self._real[result] = func(*args, **kwargs)
        except (RuntimeError, TypeError, NotImplementedError):
            return  # nothing is known then
