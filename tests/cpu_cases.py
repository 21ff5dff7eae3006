"""Random problems for the CPU kernel, each with its reference in float64."""

import math
from dataclasses import dataclass, field

import pytest
import torch

from t5fx import ops
from t5fx.inner import weight_names
from t5fx.kernels import cpu_build
from t5fx.kernels.cpu import CpuKernel
from t5fx.kernels.problem import Convolution, Problem, Tensors

KERNEL = CpuKernel()
if torch.backends.cpu.get_cpu_capability() != "AVX512":
    pytest.skip("the CPU kernel needs AVX-512", allow_module_level=True)

FLOATS = [torch.float32, *([torch.bfloat16] if cpu_build.has_bfloat16() else []), torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@dataclass
class Case:
    """One random problem: everything that a call takes, and its reference in float64."""

    inner: str = "swiglu"
    loss: str = "dot"
    eps: float | None = 1.0
    batch: int = 2
    heads: int = 3
    tokens: int = 70
    queries: int | None = None
    dim: int = 16
    value_dim: int = 16
    hidden: int = 16
    prefix: int = 0
    grid: tuple[int, ...] = ()
    side: int = 3
    bias: bool = True
    masked: bool = False
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    layout: str = "packed"
    seed: int = 0
    problem: Problem = field(init=False)

    def __post_init__(self):
        torch.manual_seed(self.seed)
        self.queries = self.tokens if self.queries is None else self.queries
        self.problem = Problem(
            self.inner, self.loss, self.eps, self.prefix, self.grid, mask_query=self.queries == self.tokens
        )
        sizes = [(self.queries, self.dim), (self.tokens, self.dim), (self.tokens, self.value_dim)]
        self.query, self.key, self.value = (self._tokens(*size) for size in sizes)
        into, out = (self.heads, self.dim, self.hidden), (self.heads, self.hidden, self.value_dim)
        shapes = [into] * (len(weight_names(self.inner)) - 1) + [out]
        self.weights = [(torch.randn(shape) * 0.7 * shape[1] ** -0.5).to(self.weight_dtype) for shape in shapes]
        self.rate = (torch.rand(self.heads) + 0.5) * self.dim**-0.5
        self.conv_query = self.conv_key = None
        if self.grid:
            self.conv_query, self.conv_key = self._convolution(), self._convolution()
        self.mask = None
        if self.masked:
            self.mask = torch.rand(self.batch, self.tokens) < 0.7
            padding = ~self.mask[:, None, :, None]
            # Padding may hold anything.
            self.key = self.key.masked_fill(padding, math.nan)
            self.value = self.value.masked_fill(padding, math.inf)

    def _tokens(self, count, dim):
        if self.layout == "packed":  # as a qkv projection leaves them
            x = torch.randn(self.batch, count, 3, self.heads, dim)[:, :, 1].transpose(1, 2)
        elif self.layout == "heads":
            x = torch.randn(self.batch, self.heads, count, dim)
        elif self.layout == "channels first":
            x = torch.randn(self.heads, self.batch, dim, count).permute(1, 0, 3, 2)
        else:  # rows with gaps, one batch row for all
            x = torch.randn(1, count, self.heads, dim + 5)[..., 2:-3].transpose(1, 2)
            x = x.expand(self.batch, -1, -1, -1)
        return (x * 1.5 + torch.randn(dim)).to(self.dtype) if self.layout == "heads" else x.to(self.dtype)

    def _convolution(self):
        shape = (self.heads * self.dim, 1, *[self.side] * len(self.grid))
        weight = torch.randn(shape) * 0.5 * self.side ** (-len(self.grid) / 2)
        bias = torch.randn(shape[0]) * 0.3 if self.bias else None
        return Convolution(weight.to(self.weight_dtype), None if bias is None else bias.to(self.weight_dtype))

    @property
    def inputs(self):
        tensors = (self.query, self.key, self.value, self.weights, self.conv_query, self.conv_key, self.mask)
        return Tensors(*tensors), self.rate

    def refusal(self):
        return KERNEL.refuse(self.problem, self.inputs[0])

    def leaves(self):
        named = {"query": self.query, "key": self.key, "value": self.value, "rate": self.rate}
        named.update({f"w{i}": weight for i, weight in enumerate(self.weights)})
        for name, conv in (("conv_query", self.conv_query), ("conv_key", self.conv_key)):
            if conv is not None:
                named[f"{name}.weight"] = conv.weight
                if conv.bias is not None:
                    named[f"{name}.bias"] = conv.bias
        return named

    def reference(self):
        """Output, cotangent and gradients, through the operators and autograd. The rate is one a head here."""
        x = {name: tensor.detach().double().requires_grad_() for name, tensor in self.leaves().items()}
        query, key, (prefix, grid) = x["query"], x["key"], (self.prefix, self.grid)
        if self.eps is not None:
            key = ops.key_norm(key, self.eps, self.mask)
        if grid:
            query_mask = self.mask if self.problem.mask_query else None
            query = ops.dwc(query, x["conv_query.weight"], x.get("conv_query.bias"), prefix, grid, query_mask)
            key = ops.dwc(key, x["conv_key.weight"], x.get("conv_key.bias"), prefix, grid, self.mask)
        weights = [x[f"w{i}"] for i in range(len(self.weights))]
        steps = ops.inner_step(key, x["value"], weights, self.inner, self.loss, 1.0, 1.0, self.mask)
        pairs = list(zip(weights, steps, strict=True))
        fast = [weight + x["rate"][:, None, None] * (step - weight) for weight, step in pairs]
        output = ops.inner_apply(query, fast, self.inner)
        # Along the change that the step makes: else d rate is a sum of both signs that cancels, and any dtype's
        # rounding is large beside it.
        change = output.detach() - ops.inner_apply(query, weights, self.inner).detach()
        cotangent = torch.randn_like(output) + 2 * change / change.square().mean().sqrt().clamp(min=1e-9)
        cotangent = cotangent.to(self.dtype)
        names = list(x)
        gradients = torch.autograd.grad(output, list(x.values()), cotangent.double())
        return output.detach(), cotangent, dict(zip(names, gradients, strict=True))

    def kernel(self, cotangent):
        output, saved = KERNEL.forward(self.problem, *self.inputs)
        found = KERNEL.backward(self.problem, *self.inputs, saved, cotangent)
        named = {"query": found.query, "key": found.key, "value": found.value, "rate": found.rate}
        named.update({f"w{i}": gradient for i, gradient in enumerate(found.weights)})
        for name in ("conv_query", "conv_key"):
            conv = getattr(found, name)
            if conv is not None:
                named[f"{name}.weight"] = conv.weight
                if conv.bias is not None:
                    named[f"{name}.bias"] = conv.bias
        return output, named
