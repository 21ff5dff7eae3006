"""What every fused kernel computes, and the shape of its call.

One *problem* is a whole converted attention site, :func:`t5fx.ops.ttt_attention`: key norm, the depthwise
convolutions of queries and keys, one gradient step of the inner model, and the inner model applied to the queries.
Shapes as in :mod:`t5fx.ops`: query [B, H, Nq, D], key [B, H, N, D], value [B, H, N, Dv], weights [H, ...].

With ``e`` the residual of the loss (``-value`` for dot, ``f(key) - value`` for mse) and ``n_b`` the tokens that take
part in row b (N without a mask), a kernel forms the *unscaled* gradients ``G = sum over tokens`` and

    fast = weight - rate[h] / n_b * G            (float32; rate = scale * inner_lr, one value a head)

so that nothing small is ever rounded to float16 on its way into a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """The numbers of a site that are no tensors.

    inner: "swiglu" or "mlp". loss: "dot" or "mse". eps: of the key norm, None for no key norm.
    grid: (w,), (h, w) or (t, h, w), tokens [prefix, prefix + prod(grid)) in row-major order; empty for no convolution.
    mask_query: the mask holds for the queries too (self-attention); it only matters to their convolution.
    """

    inner: str
    loss: str
    eps: float | None
    prefix: int
    grid: tuple[int, ...]
    mask_query: bool


class Convolution(NamedTuple):
    """weight [H*D, 1, k, k] (as many k as the grid has axes), bias [H*D] or None."""

    weight: Tensor
    bias: Tensor | None


class Tensors(NamedTuple):
    """The tensors of a call, but for its rate: what a kernel is asked about, maybe fake, and later given."""

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Sequence[Tensor]
    conv_query: Convolution | None
    conv_key: Convolution | None
    mask: Tensor | None


class Saved(NamedTuple):
    """What forward leaves for backward, all float32: stats [B, H, 2, D] (mean, 1/sqrt(var + eps); empty without
    key norm) and the fast weights [B, H, ...]."""

    stats: Tensor
    fast: list[Tensor]


class Gradients(NamedTuple):
    """In the dtypes of what they belong to; a convolution's is None where there is none. ``rate`` is float32 [H]."""

    query: Tensor
    key: Tensor
    value: Tensor
    weights: list[Tensor]
    rate: Tensor
    conv_query: Convolution | None
    conv_key: Convolution | None


class Kernel(Protocol):
    """One implementation. ``output`` is [B, H, Nq, Dv] over memory [B, Nq, H, Dv], so that joining heads is a view."""

    name: str

    def refuse(self, problem: Problem, tensors: Tensors) -> str | None:
        """Why this kernel can't take such a call (only shapes, strides, dtypes and devices are read), or None."""
        ...

    def forward(self, problem: Problem, tensors: Tensors, rate: Tensor) -> tuple[Tensor, Saved]:
        """The output, in query's dtype, and what backward needs. rate [H]."""
        ...

    def backward(self, problem: Problem, tensors: Tensors, rate: Tensor, saved: Saved, grad: Tensor) -> Gradients:
        """All gradients, from the output's ``grad`` [B, H, Nq, Dv], any strides."""
        ...


def empty_tokens(like: Tensor, tokens: int | None = None, channels: int | None = None) -> Tensor:
    """An empty [B, H, N, D] over memory [B, N, H, D], as heads are split from a projection.

    Sizes, dtype and device are those of ``like`` [B, H, N, D], but for what is given.
    """
    batch, heads, n, d = like.shape
    sizes = (batch, n if tokens is None else tokens, heads, d if channels is None else channels)
    return like.new_empty(sizes).transpose(1, 2)
