"""The fused CPU kernel: C++ in ``csrc/``, compiled at first use.

A block of 64 tokens of one head goes through key norm, convolution, inner model and its gradient while it lies in
cache; no [N, D] intermediate is ever written in forward. Products are torch's own ``brgemm`` on such blocks. Sums over
tokens are cut by shape alone, so the bits do not depend on the number of threads.

The library is a plain C interface, called through ctypes (:class:`_Call` mirrors ``csrc/call.h``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .cpu_build import BuildError, has_bfloat16, library
from .problem import Convolution, Gradients, Problem, Saved, Tensors, empty_tokens

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_LARGEST = 512  # of head_dim, value_dim and hidden: a block's activations should stay in cache


_int, _pointer = ctypes.c_int64, ctypes.c_void_p


class _View(ctypes.Structure):
    _fields_ = [("data", _pointer), ("batch", _int), ("head", _int), ("token", _int)]


class _Convolution(ctypes.Structure):
    _fields_ = [
        ("weight", _pointer),
        ("bias", _pointer),
        ("side", _int * 3),
        ("weight_grad", _pointer),
        ("bias_grad", _pointer),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, _int) for name in ("dtype", "gated", "mse", "normed", "mask_query", "threads")),
        *((name, _int) for name in ("batch", "heads", "queries", "tokens", "head_dim", "value_dim", "hidden")),
        ("prefix", _int),
        ("grid", _int * 3),
        ("eps", ctypes.c_double),
        *((name, _View) for name in ("query", "key", "value", "output")),
        *((name, _Convolution) for name in ("conv_query", "conv_key")),
        ("mask", _pointer),
        ("weights", _pointer * 3),
        ("rate", _pointer),
        ("stats", _pointer),
        ("fast", _pointer * 3),
        ("workspace", _pointer),
        *((name, _View) for name in ("query_grad", "key_grad", "value_grad")),
        ("weights_grad", _pointer * 3),
        ("rate_grad", _pointer),
    ]


class _Packed:
    """A :class:`_Call` and the tensors that its pointers point into."""

    def __init__(self, problem: Problem, tensors: Tensors, rate: Tensor) -> None:
        query, key, value, weights, conv_query, conv_key, mask = tensors
        self.call = call = _Call()
        self.kept: list[Tensor] = []
        call.dtype = _DTYPES[query.dtype]
        call.gated, call.mse = problem.inner == "swiglu", problem.loss == "mse"
        call.normed, call.mask_query = problem.eps is not None, problem.mask_query
        call.eps, call.threads = problem.eps or 0.0, torch.get_num_threads()
        call.batch, call.heads, call.queries, call.head_dim = query.shape
        call.tokens, call.value_dim, call.hidden = key.shape[2], value.shape[3], weights[0].shape[-1]
        grid = _three(problem.grid) if problem.grid else (0, 0, 0)
        call.prefix, call.grid = problem.prefix, (_int * 3)(*grid)
        call.query, call.key, call.value = self.view(query), self.view(key), self.view(value)
        call.conv_query, call.conv_key = self.convolution(conv_query), self.convolution(conv_key)
        call.mask = None if mask is None else self.pointer(mask.contiguous())
        call.weights = (_pointer * 3)(*(self.floats(weight) for weight in weights))
        call.rate = self.floats(rate)

    def pointer(self, tensor: Tensor) -> int:
        self.kept.append(tensor)
        return tensor.data_ptr()

    def floats(self, tensor: Tensor) -> int:
        return self.pointer(tensor.detach().to(torch.float32).contiguous())

    def view(self, tensor: Tensor) -> _View:
        if tensor.stride(3) != 1 and tensor.shape[3] != 1:
            tensor = tensor.contiguous()
        return _View(self.pointer(tensor), tensor.stride(0), tensor.stride(1), tensor.stride(2))

    def convolution(self, conv: Convolution | None) -> _Convolution:
        if conv is None:
            return _Convolution(None, None, (_int * 3)(0, 0, 0))
        bias = None if conv.bias is None else self.floats(conv.bias)
        return _Convolution(self.floats(conv.weight), bias, (_int * 3)(*_three(conv.weight.shape[2:])))

    def run(self, name: str) -> None:
        function, error = getattr(library(), name), ctypes.create_string_buffer(1000)
        function.restype = _int
        function.argtypes = [ctypes.POINTER(_Call), ctypes.c_int, ctypes.c_char_p, _int]

        def checked(run: bool) -> int:
            result = function(ctypes.byref(self.call), run, error, len(error))
            if result < 0:
                raise RuntimeError(f"the CPU kernel failed in {name}: {error.value.decode(errors='replace')}")
            return result

        workspace = torch.empty(checked(False), dtype=torch.uint8)
        self.call.workspace = self.pointer(workspace)
        checked(True)


def _three(sizes: Sequence[int]) -> tuple[int, ...]:
    """A grid, or a convolution's sides, as three axes: those that lack come first and are 1."""
    return (1,) * (3 - len(sizes)) + tuple(sizes)


class CpuKernel:
    """:class:`t5fx.kernels.problem.Kernel` for CPUs with AVX-512."""

    name = "cpu"

    def refuse(self, problem: Problem, tensors: Tensors) -> str | None:
        """Why this kernel can't take such a call, or None. The first call that gets so far compiles the library."""
        if problem.inner not in ("swiglu", "mlp"):
            return f"the inner model {problem.inner} is not built in"
        query, key, value, weights, conv_query, conv_key, _ = tensors
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor.device.type != "cpu":
                return f"{name} is on {tensor.device}"
        if not query.dtype == key.dtype == value.dtype:
            return f"query, key and value differ in dtype: {query.dtype}, {key.dtype}, {value.dtype}"
        if query.dtype not in _DTYPES:
            return f"{query.dtype} is not one of float32, bfloat16, float16"
        for tensor in (*weights, *(t for conv in (conv_query, conv_key) if conv for t in conv if t is not None)):
            if tensor.dtype == torch.float64:
                return "a weight is float64, which would be rounded to float32"
        if key.shape[2] == 0:
            return "there are no keys"
        sizes = {"head_dim": query.shape[3], "value_dim": value.shape[3], "hidden": weights[0].shape[-1]}
        for name, size in sizes.items():
            if size > _LARGEST:
                return f"{name} {size} is above {_LARGEST}"
        if query.dtype == torch.bfloat16 and not has_bfloat16():
            return "bfloat16 needs a CPU with AVX512_BF16"
        try:
            library()
        except BuildError as error:
            return f"the C++ kernel could not be built: {error}"
        return None

    def forward(self, problem: Problem, tensors: Tensors, rate: Tensor) -> tuple[Tensor, Saved]:
        """The output, in query's dtype, and what backward needs."""
        query, weights = tensors.query, tensors.weights
        batch, heads, _, dim = query.shape
        output = empty_tokens(query, channels=tensors.value.shape[3])
        stats = query.new_empty((batch, heads, 2, dim) if problem.eps is not None else (0,), dtype=torch.float32)
        fast = [query.new_empty((batch, *weight.shape), dtype=torch.float32) for weight in weights]
        packed = _Packed(problem, tensors, rate)
        packed.call.output = packed.view(output)
        packed.call.stats = packed.pointer(stats)
        packed.call.fast = (_pointer * 3)(*(packed.pointer(weight) for weight in fast))
        packed.run("t5fx_forward")
        return output, Saved(stats, fast)

    def backward(self, problem: Problem, tensors: Tensors, rate: Tensor, saved: Saved, grad: Tensor) -> Gradients:
        """All gradients, from the output's ``grad`` [B, H, Nq, Dv], any strides."""
        packed = _Packed(problem, tensors, rate)
        query, key, value, weights, conv_query, conv_key, _ = tensors
        call = packed.call
        call.output = packed.view(grad.to(query.dtype))
        call.stats = packed.floats(saved.stats)
        call.fast = (_pointer * 3)(*(packed.floats(weight) for weight in saved.fast))
        query_grad, key_grad, value_grad = map(empty_tokens, (query, key, value))
        call.query_grad, call.key_grad = packed.view(query_grad), packed.view(key_grad)
        call.value_grad = packed.view(value_grad)
        weights_grad = [_empty_floats(weight) for weight in weights]
        call.weights_grad = (_pointer * 3)(*(packed.pointer(tensor) for tensor in weights_grad))
        rate_grad = _empty_floats(rate)
        call.rate_grad = packed.pointer(rate_grad)
        conv_grads: list[Convolution | None] = []
        for conv, to in ((conv_query, call.conv_query), (conv_key, call.conv_key)):
            if conv is None:
                conv_grads.append(None)
                continue
            weight = _empty_floats(conv.weight)
            bias = None if conv.bias is None else _empty_floats(conv.bias)
            to.weight_grad = packed.pointer(weight)
            to.bias_grad = None if bias is None else packed.pointer(bias)
            conv_grads.append(Convolution(weight, bias))
        packed.run("t5fx_backward")
        for i, (conv, found) in enumerate(zip((conv_query, conv_key), conv_grads, strict=True)):
            if conv is not None and found is not None:
                bias = None if found.bias is None else found.bias.to(conv.bias.dtype)  # type: ignore[union-attr]
                conv_grads[i] = Convolution(found.weight.to(conv.weight.dtype), bias)
        weights_grad = [found.to(weight.dtype) for found, weight in zip(weights_grad, weights, strict=True)]
        return Gradients(query_grad, key_grad, value_grad, weights_grad, rate_grad, conv_grads[0], conv_grads[1])


def _empty_floats(like: Tensor) -> Tensor:
    return torch.empty_like(like, dtype=torch.float32, memory_format=torch.contiguous_format)
