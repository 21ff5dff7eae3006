"""Proxies that carry an example value, and the expectations they leave in a graph.

Sizes stay nodes.  Where Python needs a plain answer (a branch, ``range(n)``, ``math.sqrt(d)``) the proxy gives the
example's, and writes a call of :func:`expect` into the graph: it raises :class:`Retrace` in a call that would have got
another answer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx.proxy import Proxy

from ..errors import CaptureError

if TYPE_CHECKING:
    from .trace import OwnerTracer


class Retrace(Exception):
    """A traced graph met a call that its trace did not foresee."""


def expect(value: Any, traced: Any) -> Any:
    """In a graph: go on if ``value`` is what the trace saw; the value itself is passed on."""
    if value != traced:
        raise Retrace(f"expected {traced}, got {value}")
    return value


def expect_attribute(value: Any, name: str, traced: Any) -> None:
    """In a graph: go on if ``value.name`` is what the trace saw."""
    if getattr(value, name) != traced:
        raise Retrace(f"expected .{name} == {traced}, got {getattr(value, name)}")


def expect_length(value: Any, traced: int) -> Any:
    """In a graph: go on if ``value`` unpacks into as many parts as in the trace."""
    if len(value) != traced:
        raise Retrace(f"expected {traced} parts, got {len(value)}")
    return value


class ValueProxy(Proxy):
    """A proxy with a value.

    While a trace is on, ``isinstance(proxy, torch.Tensor)`` is answered by the value (see :func:`t5fx.capture.trace`);
    a ``__class__`` that says so would make PyTorch's C++ code take the proxy for a tensor, and crash.
    """

    tracer: OwnerTracer
    value: Any

    def __init__(self, node: fx.Node, tracer: OwnerTracer, value: Any) -> None:
        super().__init__(node, tracer)
        self.__dict__["value"] = value

    def __getattr__(self, name: str) -> Any:
        if name in ("node", "tracer", "value") or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        value, tracer = self.__dict__["value"], self.tracer
        found = getattr(value, name)  # a missing attribute fails here as it would on the tensor
        if name == "shape":
            return self.size()
        if isinstance(found, Tensor):  # .T, .mT, .data, .real
            return tracer.create_proxy("call_function", getattr, (self, name), {})
        if isinstance(found, torch.dtype) and tracer.symbolic_dtypes:
            return tracer.create_proxy("call_function", getattr, (self, name), {})
        if callable(found):
            return lambda *args, **kwargs: tracer.create_proxy("call_method", name, (self, *args), kwargs)
        if name != "ndim":
            tracer.create_node("call_function", expect_attribute, (self.node, name, found), {})
        return found

    def size(self, dim: int | None = None) -> Any:
        sizes = [self.tracer.create_proxy("call_method", "size", (self, d), {}) for d in range(self.value.dim())]
        return sizes[dim] if dim is not None else tuple(sizes)

    def dim(self) -> int:
        return self.value.dim()

    def settle(self) -> Any:
        """The plain value, and an expectation in the graph that it is the same next time."""
        if isinstance(self.value, Tensor):
            raise CaptureError(f"the forward branches on the numbers of a tensor ({self.node.format_node()})")
        self.tracer.create_node("call_function", expect, (self.node, self.value), {})
        return self.value

    def __bool__(self) -> bool:
        return bool(self.settle())

    def __index__(self) -> int:
        return operator.index(self.settle())

    def __int__(self) -> int:
        return int(self.settle())

    def __float__(self) -> float:
        return float(self.settle())

    def __len__(self) -> int:
        if isinstance(self.value, Tensor):
            return int(self.size(0))
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.value, Tensor):
            return iter([self[i] for i in range(len(self))])  # type: ignore[index]
        return iter([self[i] for i in range(len(self.value))])  # type: ignore[index]

    def __hash__(self) -> int:
        return id(self)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def _compare(function):
    def method(self, other):
        theirs = other.value if is_proxy(other) else other
        if not isinstance(self.value, Tensor) and not isinstance(theirs, (int, float, torch.dtype)):
            return NotImplemented  # n == None, n == "x": no node, Python's own answer
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


def _in_place(function):
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(ValueProxy, f"__{_name}__", _compare(getattr(operator, _name)))
for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "imod", "iand", "ior", "ixor"):
    setattr(ValueProxy, f"__{_name}__", _in_place(getattr(operator, _name)))


def is_proxy(x: Any) -> bool:
    return issubclass(type(x), Proxy)
