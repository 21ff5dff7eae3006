"""Which kernels a call would launch, and with what: the real launch code runs on tensors without memory.

:func:`launches` walks through :class:`.triton_launch.TritonKernel` with meta tensors and keeps each launch in place of
making it. So what is compiled offline is what a device would compile, with the same configurations, arguments that are
known at compile time, and hints on alignment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from . import triton_gradient, triton_launch, triton_phases
from .problem import Convolution, Problem, Tensors
from .triton_site import DTYPES

_POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
}
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


@dataclass
class Launch:
    """One kernel as triton.compile takes it. ``name`` tells apart what a kernel is launched for."""

    name: str
    kernel: JITFunction
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, int]
    grid: tuple[int, ...] = field(default=(), compare=False)

    @property
    def key(self) -> str:
        return repr((self.name, self.signature, self.constexprs, self.attrs, self.options))


@dataclass(frozen=True)
class Call:
    """A site as models have it: self-attention over a square grid, heads split from projections."""

    inner: str = "swiglu"
    loss: str = "dot"
    dtype: str = "bf16"
    head_dim: int = 64
    mask: bool = False
    tokens: int = 4096
    batch: int = 2
    heads: int = 24


def launches(target: str, call: Call) -> list[Launch]:
    """What forward and backward of a call would launch on a target, each once."""
    with _recording(target) as found:
        _run(call)
    unique = {launch.key: launch for launch in found}
    return list(unique.values())


def _run(call: Call) -> None:
    dim, side = call.head_dim, int(call.tokens**0.5)
    shape = (call.batch, call.tokens, call.heads, dim)
    options: dict[str, Any] = {"dtype": _TORCH[call.dtype], "device": "meta"}
    query, key, value, grad = (torch.empty(shape, **options).transpose(1, 2) for _ in range(4))
    weights = [torch.empty(call.heads, dim, dim, **options) for _ in range(3 if call.inner == "swiglu" else 2)]
    channels = call.heads * dim
    conv = Convolution(torch.empty(channels, 1, 3, 3, **options), torch.empty(channels, **options))
    mask = torch.empty(call.batch, call.tokens, dtype=torch.bool, device="meta") if call.mask else None
    problem = Problem(call.inner, call.loss, 1.0, 0, (side, side), call.mask)
    rate = torch.empty(call.heads, device="meta")
    kernel = triton_launch.TritonKernel()
    tensors = Tensors(query, key, value, weights, conv, conv, mask)
    _, saved = kernel.forward(problem, tensors, rate)
    kernel.backward(problem, tensors, rate, saved, grad)


@contextlib.contextmanager
def _recording(target: str) -> Iterator[list[Launch]]:
    found: list[Launch] = []

    def run(self: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        found.append(_launch(self, args, kwargs, grid))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        for module in (triton_phases, triton_gradient, triton_launch):
            stack.enter_context(mock.patch.object(module, "target_of", return_value=target))
        yield found


def _launch(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any], grid: tuple[int, ...]) -> Launch:
    names = [parameter.name for parameter in kernel.params]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    attrs: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = given.pop(parameter.name)
        aligned = True
        if parameter.is_constexpr or (_specialised(parameter, value) and value == 1):
            signature[parameter.name], constexprs[parameter.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name], aligned = "fp32", False
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0 and _specialised(parameter, value)
        if aligned:
            attrs[(index,)] = [["tt.divisibility", 16]]
    flags = "".join(letter for flag, letter in _FLAGS.items() if constexprs.get(flag))
    name = f"{kernel.__name__} {flags}".strip()
    return Launch(name, kernel, signature, constexprs, attrs, given, grid)


def _specialised(parameter: Any, value: Any) -> bool:
    return isinstance(value, int) and not parameter.do_not_specialize


_FLAGS = {"TOKEN": "T", "VALUE": "V", "KEY": "K", "WEIGHT": "W", "RESIDUAL": "R"}
