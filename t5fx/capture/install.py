"""Put rewritten graphs into the live model, and take them out again.

The model stays the object it was.  An owner's class is swapped for a subclass of its own class whose forward runs
code generated from the rewritten graph, as ``torch.nn.utils.parametrize`` does; hooks, config, methods, state_dict
keys and isinstance checks stay.  A call that no graph foresaw is traced when it comes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY as _KEPT
from torch.overrides import _len_torch_function_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from ..errors import CaptureError, T5fxError
from .dryrun import clear_fake_caches
from .owner import Conversion, Entry, add_entry, base_class, call_key, materialize, unchanged
from .proxy import Retrace
from .trace import is_hole

log = logging.getLogger("t5fx")


class Linearized:
    """Mixed into an owner's class: forward runs the graph that fits the call."""

    _t5fx_base: type
    _t5fx_owner: Conversion
    _t5fx_map_at: int | None  # where forward takes output_attentions by position
    training: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if _wants_map(self, args, kwargs):
            raise CaptureError(
                f"{self._t5fx_owner.name!r} is linearized and has no attention map, which output_attentions=True asks "
                "for: call the model without it, or t5fx.revert(model) first"
            )
        leaves, spec = tree_flatten((args, kwargs))
        key = call_key(spec, leaves, self.training)
        holes = [leaf for leaf in leaves if is_hole(leaf)]
        for entry in self._t5fx_owner.entries.get(key, ()):
            if unchanged(self, entry.attributes):
                try:
                    return entry.function(self, *holes)
                except Retrace:
                    continue
        entry = _trace_now(self, args, kwargs)
        try:
            return entry.function(self, *holes)
        except Retrace as error:
            raise CaptureError(
                f"{self._t5fx_owner.name!r}: its forward decides on something that is not the same when it is traced "
                f"and when it runs ({error})"
            ) from error

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new_linearized, (type(self)._t5fx_base,), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        inherited = getattr(super(), "__getstate__", None)  # Python 3.10 has none for plain objects
        return dict(inherited()) if inherited is not None else self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        if not self._t5fx_owner.entries:  # from a pickle; a deepcopy brings them
            warm(cast(nn.Module, self))


def _wants_map(owner: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Whether transformers' ``output_attentions`` is on, in the call or in the configuration.

    Its models collect the maps by hooks that pass over an owner without one, so nobody would notice.
    """
    at = owner._t5fx_map_at
    return (
        kwargs.get("output_attentions")
        or (at is not None and len(args) > at and args[at])
        or getattr(getattr(owner, "config", None), "output_attentions", False)
    )


@functools.cache
def linearized_class(base: Any) -> type:
    """The subclass of ``base`` that an owner gets."""
    forward = functools.wraps(base.forward)(lambda self, *args, **kwargs: Linearized.forward(self, *args, **kwargs))
    names = list(inspect.signature(base.forward).parameters)[1:]  # after self
    namespace = {
        "_t5fx_base": base,
        "_t5fx_map_at": names.index("output_attentions") if "output_attentions" in names else None,
        "forward": forward,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
    }
    return type(f"Linearized{base.__name__}", (Linearized, base), namespace)


def _new_linearized(base: type) -> Any:
    cls: Any = linearized_class(base)
    return cls.__new__(cls)


@contextlib.contextmanager
def _outside_modes() -> Iterator[None]:
    """Leave the dispatch and function modes that are on: inside them (torch.export's, for one) a trace would leave
    its own operators in their graph."""
    popped = [_pop_mode() for _ in range(_len_torch_function_stack())]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(popped):
            _push_mode(mode)


@torch.compiler.disable(
    reason="a module converted by t5fx met a kind of call that it has not seen: run the model once in eager mode with "
    "such inputs before compiling it with fullgraph=True"
)
def _trace_now(module: Any, args: tuple, kwargs: dict[str, Any]) -> Entry:
    with _outside_modes():
        entry = add_entry(module, module._t5fx_owner, args, kwargs, module.training)
        clear_fake_caches()
        return entry


def warm(owner: nn.Module) -> None:
    """Trace an owner's known calls again (after unpickling or loading); one that fails is left for its first use."""
    failed: T5fxError | None = None
    conversion: Conversion = owner._t5fx_owner  # type: ignore[assignment]
    known, conversion.calls = conversion.calls, []
    for call, training in known:
        try:
            args, kwargs = materialize(call, owner)
            add_entry(owner, conversion, args, kwargs, training)
        except T5fxError as error:
            failed = error
    if failed is not None:
        log.warning("%s will be traced at its first call: %s", conversion.name or "the model", failed)


# -- into the model and out again -----------------------------------------------------------------------------


def install(owner: nn.Module, conversion: Conversion, graph: fx.Graph | None = None) -> None:
    """Make ``owner`` run its rewritten graphs; a GraphModule gets the new ``graph`` instead."""
    owner.__dict__["_t5fx_owner"] = conversion
    if isinstance(owner, nn.MultiheadAttention):
        owner.register_forward_pre_hook(KeepSlowPath())
    if isinstance(owner, fx.GraphModule):
        assert graph is not None
        conversion.original_graph = owner.graph
        owner.graph = graph
        owner.recompile()
        owner.meta.setdefault(_KEPT, {})["_t5fx_owner"] = conversion  # a deepcopy of a GraphModule keeps only these
    else:
        owner.__class__ = linearized_class(cast(Any, type(owner)))


class RefuseMaps:
    """A hook of a transformers model that collects attention maps by hooks: not all of them tell their layers."""

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
            raise CaptureError(
                f"{type(module).__name__} is linearized: converted sites have no attention map, which "
                "output_attentions=True asks for. Call it without, or t5fx.revert(model) first"
            )


class KeepSlowPath:
    """A hook that does nothing: with one, torch.nn.TransformerEncoderLayer calls its attention's forward in eval too,
    instead of its fused fast path."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        return None


def uninstall(owner: nn.Module) -> None:
    """Give ``owner`` its class (or graph) back and drop its new parameters."""
    conversion: Conversion = owner.__dict__.pop("_t5fx_owner")
    if isinstance(owner, fx.GraphModule):
        if conversion.original_graph is None:
            raise CaptureError(
                "an unpickled GraphModule does not remember its original graph: revert the one it came from"
            )
        owner.graph = copy.deepcopy(conversion.original_graph)
        owner.recompile()
        for name in ("_t5fx_owner", "_t5fx"):
            owner.meta.get(_KEPT, {}).pop(name, None)
    else:
        owner.__class__ = base_class(owner)
    for key in [key for key, hook in owner._forward_pre_hooks.items() if isinstance(hook, KeepSlowPath)]:
        del owner._forward_pre_hooks[key]
    for spec in conversion.sites:
        parent, _, name = spec.ttt.rpartition(".")
        delattr(owner.get_submodule(parent), name)


def is_linearized(module: nn.Module) -> bool:
    """Whether this very module (not one inside) was converted."""
    return "_t5fx_owner" in module.__dict__
