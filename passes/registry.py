"""Teach t5fx an attention function that it does not know.

    @t5fx.passes.register(torch.ops.mylib.flash.default)
    def flash(query, key, value, softmax_scale):
        out = F.scaled_dot_product_attention(query.transpose(1, 2), ..., scale=softmax_scale)
        return out.transpose(1, 2)

A registered function takes what the original takes, returns what it returns, and says in the open, around
``F.scaled_dot_product_attention``, what it computes.  Discovery and tracing call it instead of the original, so that
the site inside is found, matched and rewritten like any other; a model that is not converted never calls it.  What is
registered can be:

- a torch function or operator (anything that a ``TorchFunctionMode`` sees): pass it;
- a Python function that a model calls by name, such as a CUDA extension's: pass ``"module:name"``, the place where the
  model looks it up;
- the forward of a module class: pass the class; the replacement takes ``self`` too.

A package registers its own through the entry point group ``t5fx.passes``: each entry is loaded, and called if it is a
function, before the first model is looked at.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from ..errors import T5fxError
from .mha import mha_forward, multi_head_attention

FUNCTIONS: dict[Any, Callable] = {F.multi_head_attention_forward: multi_head_attention}
FORWARDS: dict[Any, Callable] = {nn.MultiheadAttention.forward: mha_forward}
NAMES: dict[str, Callable] = {}


def register(target: Any, replacement: Callable | None = None, *, check: Callable[[], tuple] | None = None) -> Any:
    """Register ``replacement`` for ``target``; without it, a decorator.

    Args:
        target: a torch function or operator, ``"module:name"``, or an ``nn.Module`` class.
        check: returns arguments; both forms are run on them at once and must agree to 1e-4.

    Raises:
        T5fxError: ``target`` is nothing that can be registered, or the two forms disagree.
    """
    if replacement is None:
        return lambda function: register(target, function, check=check)
    if check is not None:
        _compare(target, replacement, check())
    if isinstance(target, str):
        _find(target)
        NAMES[target] = replacement
    elif isinstance(target, type) and issubclass(target, nn.Module):
        module_class: Any = target
        FORWARDS[module_class.forward] = replacement
    elif callable(target):
        FUNCTIONS[target] = replacement
    else:
        raise T5fxError(f"register takes a torch function, 'module:name' or an nn.Module class, not {target!r}")
    return replacement


def unregister(target: Any) -> None:
    """Forget what was registered for ``target``."""
    if isinstance(target, str):
        NAMES.pop(target, None)
    elif isinstance(target, type):
        FORWARDS.pop(getattr(target, "forward", None), None)
    else:
        FUNCTIONS.pop(target, None)


@contextlib.contextmanager
def in_the_open() -> Iterator[None]:
    """Inside, the functions that are registered by name are their replacements."""
    load_entry_points()
    saved = []
    try:
        for name, replacement in NAMES.items():
            holder, attribute = _find(name)
            saved.append((holder, attribute, getattr(holder, attribute)))
            setattr(holder, attribute, replacement)
        yield
    finally:
        for holder, attribute, original in reversed(saved):
            setattr(holder, attribute, original)


@functools.cache
def load_entry_points() -> None:
    """Load the entry points of the group ``t5fx.passes``, once.

    Raises:
        T5fxError: one of them fails; the message names it.
    """
    for entry in entry_points(group="t5fx.passes"):
        try:
            loaded = entry.load()
            if callable(loaded):
                loaded()
        except Exception as error:
            raise T5fxError(f"the t5fx.passes entry point {entry.name!r} ({entry.value}) failed: {error}") from error


def _find(name: str) -> tuple[Any, str]:
    module, colon, path = name.partition(":")
    *parents, attribute = path.split(".")
    try:
        holder: Any = importlib.import_module(module)
        for parent in parents:
            holder = getattr(holder, parent)
        getattr(holder, attribute)
    except (ImportError, AttributeError) as error:
        raise T5fxError(f"register: {name!r} names nothing ({error}); write 'module:name'") from error
    if not colon:
        raise T5fxError(f"register: {name!r} has no colon; write 'module:name'")
    return holder, attribute


def _compare(target: Any, replacement: Callable, arguments: tuple) -> None:
    original = getattr(*_find(target)) if isinstance(target, str) else target
    if isinstance(original, type):
        original = getattr(original, "forward")  # noqa: B009
    with torch.no_grad():
        pairs = [tree_leaves(function(*arguments)) for function in (original, replacement)]
    for a, b in zip(*pairs, strict=True):
        if isinstance(a, torch.Tensor) and not torch.allclose(a, b, rtol=1e-4, atol=1e-4):
            raise T5fxError(f"register: {target!r} and its replacement differ by {float((a - b).abs().max()):.3g}")
