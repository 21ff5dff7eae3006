"""Trace one owner's forward into an fx graph, with example values at hand.

Plain symbolic tracing stops at the first ``if x.shape[1] > 1``.  Here every proxy carries the value it has on fake
example inputs.  Sizes stay nodes of the graph, so the graph serves other batches and resolutions; where Python
needs a plain bool, int or dtype, the example's answer is used and an *expectation* is written into the graph,
which raises :class:`Retrace` when another call would have gone another way.  The caller then traces again.

All submodules are leaves (``call_module``): an owner is the innermost module around its attention call, so nothing
inside a submodule has to be seen, and whatever a user puts there later (LoRA, quantised or parametrised Linears,
offload hooks) keeps working.  Parameters and buffers become ``get_attr``.
"""

from __future__ import annotations

import builtins
import contextlib
import operator
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ..errors import CaptureError
from ..passes.registry import FUNCTIONS, in_the_open
from .dryrun import preserved
from .proxy import ValueProxy, expect_length, is_proxy

_SIZED = ("empty", "zeros", "ones", "full", "arange", "linspace", "eye", "rand", "randn")
_PATCHING = threading.RLock()  # tracing patches nn.Module for its own proxies; one thread at a time


def is_hole(leaf: Any) -> bool:
    """Whether a leaf of a call's arguments becomes a placeholder: tensors and plain numbers."""
    numbers = (int, float, torch.SymInt, torch.SymFloat)
    return isinstance(leaf, Tensor) or (isinstance(leaf, numbers) and not isinstance(leaf, bool))


@dataclass
class Traced:
    """A traced forward: placeholders are the tensors and ints of the call, in pytree order."""

    graph: fx.Graph
    values: dict[fx.Node, Any]
    mode: FakeTensorMode


class OwnerTracer(fx.Tracer):
    """Traces the forward of one module; use :func:`trace`."""

    def __init__(self, owner: nn.Module, mode: FakeTensorMode, symbolic_dtypes: bool = True) -> None:
        super().__init__()
        self.symbolic_dtypes = symbolic_dtypes
        self.root = owner
        self.mode = mode
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self.module_names = {id(m): name for name, m in owner.named_modules()}
        self.tensor_names = {id(t): n for n, t in (*owner.named_parameters(), *owner.named_buffers())}
        self.attributes: dict[str, Any] = {}
        self.executing = 0
        self.state: tuple = ()

    def create_arg(self, a: Any) -> Any:
        if is_proxy(a):
            return a.node
        if type(a) in (tuple, list):
            return type(a)(self.create_arg(x) for x in a)
        if type(a) is torch.Size:
            return tuple(self.create_arg(x) for x in a)
        if type(a) is dict:
            return {k: self.create_arg(v) for k, v in a.items()}
        if type(a) is slice:
            return slice(*(self.create_arg(x) for x in (a.start, a.stop, a.step)))
        if isinstance(a, Tensor):
            name = self.tensor_names.get(id(a))
            if name is None:
                raise CaptureError("the forward uses a tensor that is neither an argument, a parameter nor a buffer")
            return self.attribute(name, a).node
        if isinstance(a, (torch.dtype, torch.device, torch.memory_format, torch.layout, str, type(None), type(...))):
            return a
        if isinstance(a, (bool, int, float, complex)):
            return a
        return super().create_arg(a)

    def attribute(self, name: str, value: Tensor) -> Any:
        if name not in self.attributes:
            self.attributes[name] = self._proxy(self.create_node("get_attr", name, (), {}), value)
        return self.attributes[name]

    def create_proxy(self, kind, target, args, kwargs, name=None, type_expr=None, *_, **__):
        if torch_state() != self.state:
            raise CaptureError("part of the forward runs under torch.no_grad() or an autocast of its own")
        args, kwargs = self.create_arg(tuple(args)), self.create_arg(dict(kwargs))
        node = self.create_node(kind, target, args, kwargs, name, type_expr)
        concrete_args, concrete_kwargs = map_arg((args, kwargs), lambda n: self.values[n])
        self.executing += 1
        try:
            with self.mode, torch.no_grad():
                if kind == "call_function":
                    value = target(*concrete_args, **concrete_kwargs)
                elif kind == "call_method":
                    value = getattr(concrete_args[0], target)(*concrete_args[1:], **concrete_kwargs)
                else:
                    value = self.root.get_submodule(target)(*concrete_args, **concrete_kwargs)
        finally:
            self.executing -= 1
        return self._wrap(node, value)

    def _wrap(self, node: fx.Node, value: Any) -> Any:
        self.values[node] = value
        if type(value) in (tuple, list):
            if node.op != "call_module":
                node = self.create_node("call_function", expect_length, (node, len(value)), {})
                self.values[node] = value
            parts = [self._wrap(self.create_node("call_function", operator.getitem, (node, i), {}), v)
                     for i, v in enumerate(value)]  # fmt: skip
            return type(value)(parts)
        if isinstance(value, bool):
            return self._proxy(node, value).settle()
        if value is None or isinstance(value, (str, torch.device)):
            return value
        if isinstance(value, torch.dtype) and not self.symbolic_dtypes:
            return value
        return self._proxy(node, value)

    def _proxy(self, node: fx.Node, value: Any) -> ValueProxy:
        self.values[node] = value
        return ValueProxy(node, self, value)


class _Factories(TorchFunctionMode):
    """Record the torch calls that no proxy takes part in, such as ``torch.arange(n)``: their results are data too."""

    def __init__(self, tracer: OwnerTracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.tracer.executing:
            return func(*args, **kwargs)
        if func is torch._C._set_grad_enabled and args[0] != torch.is_grad_enabled():
            raise CaptureError("part of the forward runs under torch.no_grad() or an autocast of its own")
        if func in FUNCTIONS:
            return FUNCTIONS[func](*args, **kwargs)
        if any(map(is_proxy, tree_leaves((args, kwargs)))):
            return self.tracer.create_proxy("call_function", func, args, kwargs)
        if getattr(func, "__name__", "") == "__get__":  # an attribute of a tensor, such as .shape
            return func(*args, **kwargs)
        with self.tracer.mode, torch.no_grad():
            self.tracer.executing += 1
            try:
                out = func(*args, **kwargs)
            finally:
                self.tracer.executing -= 1
        if not any(isinstance(x, Tensor) for x in tree_leaves(out)):
            return out
        return self.tracer.create_proxy("call_function", func, args, kwargs)


@contextlib.contextmanager
def _patched(tracer: OwnerTracer) -> Iterator[None]:
    """Inside, calls of submodules with proxies and reads of parameters are recorded (as torch.fx itself does), and
    ``isinstance`` sees the values of proxies."""
    call, getattribute, is_instance = nn.Module.__call__, nn.Module.__getattr__, builtins.isinstance
    thread = threading.get_ident()

    def traced_call(module, *args, **kwargs):
        if tracer.executing or threading.get_ident() != thread:
            return call(module, *args, **kwargs)
        name = tracer.module_names.get(id(module))
        if name is None:
            raise CaptureError(f"the forward calls a {type(module).__name__} that is not one of its submodules")
        return tracer.create_proxy("call_module", name, args, kwargs)

    def traced_getattr(module, name):
        found = getattribute(module, name)
        if tracer.executing or threading.get_ident() != thread or not isinstance(found, Tensor):
            return found
        qualified = tracer.tensor_names.get(id(found))
        return found if qualified is None else tracer.attribute(qualified, found)

    factories = {name: getattr(torch, name) for name in _SIZED}

    def traced_factory(function):  # the C++ parser takes no proxy for a size
        def make(*args, **kwargs):
            proxies = not tracer.executing and any(map(is_proxy, tree_leaves((args, kwargs))))
            if proxies and threading.get_ident() == thread:
                return tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return make

    enter = torch.autocast.__enter__

    def traced_enter(self):
        if not tracer.executing and threading.get_ident() == thread:
            raise CaptureError("part of the forward runs under torch.no_grad() or an autocast of its own")
        return enter(self)

    def traced_isinstance(x, kinds):
        return is_instance(x, kinds) or (type(x) is ValueProxy and is_instance(x.value, kinds))

    with _PATCHING:
        nn.Module.__call__, nn.Module.__getattr__ = traced_call, traced_getattr  # type: ignore[method-assign]
        builtins.isinstance = traced_isinstance
        torch.autocast.__enter__ = traced_enter  # type: ignore[method-assign]
        for name, function in factories.items():
            setattr(torch, name, traced_factory(function))
        try:
            yield
        finally:
            for name, function in factories.items():
                setattr(torch, name, function)
            nn.Module.__call__, nn.Module.__getattr__ = call, getattribute  # type: ignore[method-assign]
            builtins.isinstance = is_instance
            torch.autocast.__enter__ = enter  # type: ignore[method-assign]


def trace(owner: nn.Module, forward: Any, args: tuple, kwargs: dict[str, Any], mode: FakeTensorMode) -> Traced:
    """Trace ``forward`` (an unbound function of ``owner``'s class) on fake ``args`` and ``kwargs``.

    Returns:
        the graph, with one placeholder for each tensor and number of the call in pytree order, and the example
        value of every node.

    Raises:
        CaptureError: the forward does something a graph can't hold; the message says what.
    """
    try:  # dtypes as nodes serve .to(bfloat16) and autocast without a new trace, but not every use of a dtype allows it
        return _trace(OwnerTracer(owner, mode), forward, args, kwargs)
    except CaptureError:
        return _trace(OwnerTracer(owner, mode, symbolic_dtypes=False), forward, args, kwargs)


def _trace(tracer: OwnerTracer, forward: Any, args: tuple, kwargs: dict[str, Any]) -> Traced:
    owner = tracer.root
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    inputs = []
    for i, leaf in enumerate(leaves):
        if is_hole(leaf):
            inputs.append(tracer._proxy(tracer.create_node("placeholder", f"arg{i}", (), {}), leaf))
        else:
            inputs.append(leaf)
    call_args, call_kwargs = tree_unflatten(inputs, spec)
    before = dict(owner.__dict__)
    try:
        with preserved(owner), torch.enable_grad(), in_the_open(), _patched(tracer), _Factories(tracer):
            tracer.state = torch_state()
            out = forward(owner, *call_args, **call_kwargs)
            kept = [k for k, v in owner.__dict__.items() if before.get(k) is not v and _holds_proxy(v)]
        if kept:
            raise CaptureError(f"the forward stores its results on the module (self.{kept[0]})")
        tracer.create_node("output", "output", (tracer.create_arg(out),), {})
    except CaptureError:
        raise
    except Exception as error:  # user code can fail in any way on proxies
        raise CaptureError(f"the forward could not be traced: {type(error).__name__}: {str(error)[:300]}") from error
    _drop_unused_sizes(tracer.graph)
    return Traced(tracer.graph, tracer.values, tracer.mode)


def torch_state() -> tuple:
    """What a graph does not hold: whether gradients are on, and autocast."""
    devices = ("cpu", "cuda")
    return torch.is_grad_enabled(), *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)


def _holds_proxy(value: Any) -> bool:
    return any(map(is_proxy, tree_leaves(value)))


_ARITHMETIC = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
    operator.neg, operator.getitem, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
}  # fmt: skip


def _drop_unused_sizes(graph: fx.Graph) -> None:
    for node in reversed(graph.nodes):
        pure = node.op == "get_attr" or node.target is getattr or (node.op == "call_method" and node.target == "size")
        if not node.users and (pure or node.target in _ARITHMETIC):
            graph.erase_node(node)
