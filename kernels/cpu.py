"""The fused CPU kernel: C++ in ``csrc/``, compiled at first use.

A block of 64 tokens of one head goes through key norm, convolution, inner model and its gradient while it lies in
cache; no [N, D] intermediate is ever written in forward. Products are torch's own ``brgemm`` on such blocks. Sums over
tokens are cut by shape alone, so the bits do not depend on the number of threads.

The library is a plain C interface, called through ctypes (:class:`_Call` mirrors ``csrc/call.h``). It lies in
Inductor's cache directory under a hash of everything that it is made of. See :func:`library`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .problem import Convolution, Gradients, Problem, Saved

_SOURCES = Path(__file__).parent / "csrc"
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ISA = ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw")
_LARGEST = 512  # of head_dim, value_dim and hidden: a block's activations should stay in cache


# ---- build ---------------------------------------------------------------------------------------------


class BuildError(RuntimeError):
    """The library could not be compiled or loaded; the message is the reason."""


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled kernel. Raises BuildError: no AVX-512, no compiler, or what the compiler said.

    Two processes that build at once both compile, and each renames its finished file into place.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        raise BuildError(f"it needs AVX-512, this CPU runs torch as {torch.backends.cpu.get_cpu_capability()}")
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.utils.cpp_extension import TORCH_LIB_PATH, include_paths

    try:
        compiler = get_cpp_compiler()
    except Exception as error:
        raise BuildError(f"no C++ compiler was found (set CXX): {error}") from error
    flags = ["-std=c++20", "-O3", "-fno-math-errno", "-fPIC", "-shared", "-fopenmp", *_isa_flags()]
    sources = sorted(_SOURCES.glob("*.cpp"))
    key = hashlib.sha256(repr((torch.__version__, torch.version.git_version, compiler, flags)).encode())
    for path in sorted(_SOURCES.iterdir()):
        key.update(path.name.encode() + path.read_bytes())
    folder = Path(cache_dir()) / "t5fx"
    target = folder / f"cpu_{key.hexdigest()[:24]}.so"
    try:
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            includes = [f"-I{path}" for path in include_paths()]
            links = [f"-L{TORCH_LIB_PATH}", "-lc10", "-ltorch_cpu"]
            handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
            os.close(handle)
            try:
                command = [compiler, *flags, *includes, *map(str, sources), "-o", name, *links]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise BuildError(f"{compiler} failed:\n{done.stderr[-2000:]}")
                os.replace(name, target)
            finally:
                Path(name).unlink(missing_ok=True)
        lib = ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(f"the compiled library can't be written or loaded: {error}") from error
    for name in ("t5fx_forward", "t5fx_backward"):
        function = getattr(lib, name)
        function.restype = ctypes.c_int64
        function.argtypes = [ctypes.POINTER(_Call), ctypes.c_int, ctypes.c_char_p, ctypes.c_int64]
    return lib


def _isa_flags() -> list[str]:
    return [*_ISA, *(["-mavx512bf16"] if _bfloat16_instructions() else [])]


def _bfloat16_instructions() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported())


# ---- call ----------------------------------------------------------------------------------------------

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
        *((name, _int) for name in ("dtype", "gated", "mse", "normed", "mask_query")),
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

    def __init__(self, problem: Problem, query, key, value, weights, rate, conv_query, conv_key, mask):
        self.call = call = _Call()
        self.kept: list[Tensor] = []
        call.dtype = _DTYPES[query.dtype]
        call.gated, call.mse = problem.inner == "swiglu", problem.loss == "mse"
        call.normed, call.mask_query = problem.eps is not None, problem.mask_query
        call.eps = problem.eps or 0.0
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

    def refuse(
        self,
        problem: Problem,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weights: Sequence[Tensor],
        conv_query: Convolution | None,
        conv_key: Convolution | None,
        mask: Tensor | None,
    ) -> str | None:
        """Why this kernel can't take such a call, or None. The first call that gets so far compiles the library."""
        if problem.inner not in ("swiglu", "mlp"):
            return f"the inner model {problem.inner} is not built in"
        tensors = {"query": query, "key": key, "value": value}
        for name, tensor in tensors.items():
            if tensor.device.type != "cpu":
                return f"{name} is on {tensor.device}"
        if len({tensor.dtype for tensor in tensors.values()}) > 1:
            return "query, key and value differ in dtype: " + ", ".join(str(t.dtype) for t in tensors.values())
        if query.dtype not in _DTYPES:
            return f"{query.dtype} is not one of float32, bfloat16, float16"
        for tensor in (*weights, *(t for conv in (conv_query, conv_key) if conv for t in conv if t is not None)):
            if tensor.dtype == torch.float64:
                return "a weight is float64, which would be rounded to float32"
        sizes = {"head_dim": query.shape[3], "value_dim": value.shape[3], "hidden": weights[0].shape[-1]}
        for name, size in sizes.items():
            if size > _LARGEST:
                return f"{name} {size} is above {_LARGEST}"
        if query.dtype == torch.bfloat16 and not _bfloat16_instructions():
            return "bfloat16 needs a CPU with AVX512_BF16"
        try:
            library()
        except BuildError as error:
            return f"the C++ kernel could not be built: {error}"
        return None

    def forward(
        self,
        problem: Problem,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weights: Sequence[Tensor],
        rate: Tensor,
        conv_query: Convolution | None,
        conv_key: Convolution | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Saved]:
        """The output, in query's dtype, and what backward needs."""
        batch, heads, queries, dim = query.shape
        output = query.new_empty(batch, queries, heads, value.shape[3]).transpose(1, 2)
        stats = query.new_empty((batch, heads, 2, dim) if problem.eps is not None else (0,), dtype=torch.float32)
        fast = [query.new_empty((batch, *weight.shape), dtype=torch.float32) for weight in weights]
        if math.prod((batch, heads, queries, dim)) or fast[0].numel():
            packed = _Packed(problem, query, key, value, weights, rate, conv_query, conv_key, mask)
            packed.call.output = packed.view(output)
            packed.call.stats = packed.pointer(stats)
            packed.call.fast = (_pointer * 3)(*(packed.pointer(weight) for weight in fast))
            packed.run("t5fx_forward")
        return output, Saved(stats, fast)

    def backward(
        self,
        problem: Problem,
        grad: Tensor,
        saved: Saved,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weights: Sequence[Tensor],
        rate: Tensor,
        conv_query: Convolution | None,
        conv_key: Convolution | None,
        mask: Tensor | None,
    ) -> Gradients:
        """All gradients, from the output's ``grad`` [B, H, Nq, Dv], any strides."""
        packed = _Packed(problem, query, key, value, weights, rate, conv_query, conv_key, mask)
        call = packed.call
        call.output = packed.view(grad.to(query.dtype))
        call.stats = packed.floats(saved.stats)
        call.fast = (_pointer * 3)(*(packed.floats(weight) for weight in saved.fast))
        query_grad, key_grad, value_grad = (_heads_last(tensor) for tensor in (query, key, value))
        call.query_grad, call.key_grad = packed.view(query_grad), packed.view(key_grad)
        call.value_grad = packed.view(value_grad)
        floats = {"dtype": torch.float32, "memory_format": torch.contiguous_format}
        weights_grad = [torch.empty_like(weight, **floats) for weight in weights]
        call.weights_grad = (_pointer * 3)(*(packed.pointer(tensor) for tensor in weights_grad))
        rate_grad = torch.empty_like(rate, **floats)
        call.rate_grad = packed.pointer(rate_grad)
        conv_grads: list[Convolution | None] = []
        for conv, to in ((conv_query, call.conv_query), (conv_key, call.conv_key)):
            if conv is None:
                conv_grads.append(None)
                continue
            weight = torch.empty_like(conv.weight, **floats)
            bias = None if conv.bias is None else torch.empty_like(conv.bias, **floats)
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


def _heads_last(like: Tensor) -> Tensor:
    """An empty [B, H, N, D] over memory [B, N, H, D]: the layout that a projection's gradient is computed in."""
    batch, heads, tokens, dim = like.shape
    return like.new_empty(batch, tokens, heads, dim).transpose(1, 2)
