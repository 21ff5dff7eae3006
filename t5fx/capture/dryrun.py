"""Run a model without arithmetic and without a trace: fake tensors in, everything it touched put back.

A forward may write on its modules (caches, statistics, counters), even a pretended one.  What it wrote in a dry
run are fake tensors, which must not stay behind; :func:`preserved` restores every attribute of every module.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_map

_TABLES = ("_parameters", "_buffers", "_modules")
_LRU = type(functools.lru_cache(len))


def _link_type() -> type:
    """CPython's private list element that holds a result of a bounded lru_cache."""
    probe = functools.lru_cache(maxsize=2)(lambda x: [x])
    probe(0)
    names = {type(o) for r in gc.get_referents(probe) for o in (r, *gc.get_referents(r))}
    return next((t for t in names if t.__name__ == "_lru_list_elem"), dict)


_HOLDERS = (dict, tuple, list, _link_type())


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put back all attributes, buffers, parameters and modes of ``model`` and its submodules afterwards."""
    saved = []
    for module in model.modules():
        state = module.__dict__
        contents = {key: type(value)(value) for key, value in state.items() if type(value) in (dict, list)}
        saved.append((state, dict(state), contents))
    try:
        yield
    finally:
        for state, before, contents in saved:
            for key in [key for key in state if key not in before]:
                del state[key]
            for key, value in before.items():
                if state.get(key) is not value:
                    state[key] = value
            for key, content in contents.items():
                value = before[key]
                if isinstance(value, dict) and (
                    list(value) != list(content) or any(value[k] is not v for k, v in content.items())
                ):
                    value.clear()
                    value.update(content)
                elif isinstance(value, list) and [*map(id, value)] != [*map(id, content)]:
                    value[:] = content


def clear_fake_caches() -> None:
    """Empty every ``lru_cache`` that remembers a fake tensor: a later real run would get it served.

    Rotary embeddings cache coordinates like this, at module level, so the model's attributes do not lead there.
    """
    for wrapper in [obj for obj in gc.get_objects() if type(obj) is _LRU]:
        todo, depth = gc.get_referents(wrapper), 0
        while todo and depth < 4:
            if any(isinstance(obj, FakeTensor) for obj in todo):
                wrapper.cache_clear()
                break
            todo = [o for obj in todo if type(obj) in _HOLDERS for o in gc.get_referents(obj)]
            depth += 1


def fake_buffers(model: nn.Module, mode: FakeTensorMode) -> None:
    """Put fakes in the place of all buffers, so that counters and statistics count there; within :func:`preserved`."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not isinstance(buffer, FakeTensor):
                module._buffers[name] = mode.from_tensor(buffer)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode without calling ``eval()`` (which a model may override); the modes come back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.__dict__["training"] = False
        yield
    finally:
        for module, mode in modes:
            module.__dict__["training"] = mode


def on_meta(model: nn.Module) -> bool:
    """Whether the parameters of ``model`` hold no data at all."""
    tensor = next((t for t in (*model.parameters(), *model.buffers())), None)
    return tensor is not None and tensor.device.type == "meta"


def new_fake_mode() -> FakeTensorMode:
    """A fake mode that takes real parameters as they are (nothing is copied)."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def to_fake(tree: Any, mode: FakeTensorMode, device: torch.device | None = None) -> Any:
    """``tree`` with its tensors replaced by fake ones of the same shape, strides, dtype and device.

    A tensor that is fake already, of whatever mode, is made anew from its description: sizes that are symbolic
    become their example values.
    """

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if isinstance(leaf, FakeTensor) and leaf.fake_mode is mode:
            return leaf
        shape, strides = [int(s) for s in leaf.shape], [int(s) for s in leaf.stride()]
        with mode:
            return torch.empty_strided(shape, strides, dtype=leaf.dtype, device=device or leaf.device)

    return tree_map(fake, tree)
