"""A whole site in plain PyTorch, forward and backward: what every fused kernel computes, line by line.

Forward is :mod:`t5fx.ops` in another order. Backward is written out, since a fused operator has no tape: it is the
formula that the kernels implement, and the tests hold it equal to autograd through the operators.

Names follow one rule: ``d_x`` is the cotangent of ``x``. For SwiGLU, with s = sigmoid(gate), the forward step is

    act = gate s      hidden = act up      error = -value | hidden w3 - value      d_hidden = error w3^T
    G1 = key^T (d_hidden up silu'(gate))   G2 = key^T (d_hidden act)               G3 = hidden^T error

where ``d_hidden`` already is a gradient, that of the inner loss: the cotangent of *it* is called ``dd_hidden``.
The MLP is the same without ``up``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..inner import check_mask, resolve, token_count, weight_names, zero_masked
from ..ops import compute_dtype, dwc
from .problem import Convolution, Gradients, Problem, Saved, Tensors


class ReferenceKernel:
    """Takes everything; computes in float32, or float64 where a tensor is. For tests, and for devices without one."""

    name = "reference"

    def refuse(self, problem: Problem, tensors: Tensors) -> str | None:
        return None

    def forward(self, problem: Problem, tensors: Tensors, rate: Tensor) -> tuple[Tensor, Saved]:
        query, key, value, weights, conv_query, conv_key, mask = tensors
        dtype = compute_dtype(query, key, value, *weights)
        stats, key = _key_norm(problem, key.to(dtype), mask)
        query, key = _convolve(problem, query.to(dtype), key, conv_query, conv_key, mask)
        gradients = _step(problem, _Inner(problem, weights, key, value.to(dtype), mask))
        factor = _factor(rate.to(dtype), key, mask)
        fast = [w.to(dtype) - factor * g for w, g in zip(weights, gradients, strict=True)]
        model = resolve(problem.inner)
        out = model.apply(dict(zip(weight_names(problem.inner), fast, strict=True)), query)
        return out, Saved(stats, fast)

    def backward(self, problem: Problem, tensors: Tensors, rate: Tensor, saved: Saved, grad: Tensor) -> Gradients:
        query, key, value, weights, conv_query, conv_key, mask = tensors
        dtype = compute_dtype(query, key, value, *weights)
        grad, raw_query = grad.to(dtype), query.to(dtype)
        normed = _normed(key.to(dtype), saved.stats, mask)
        query, key = _convolve(problem, raw_query, normed, conv_query, conv_key, mask)
        fast = [f.to(dtype) for f in saved.fast]

        d_query, d_fast = _apply_backward(problem, query, fast, grad)
        # fast = weight - rate / n * G: the cotangent of G, and that of rate, which sees fast - weight = -rate / n * G
        factor = _factor(rate.to(dtype), key, mask)
        d_step = [-factor * d for d in d_fast]
        d_rate = torch.zeros_like(rate, dtype=dtype)
        for d, new, old in zip(d_fast, fast, weights, strict=True):
            d_rate += (d * (new - old.to(dtype))).sum((0, 2, 3)) / rate.to(dtype)
        inner = _Inner(problem, weights, key, value.to(dtype), mask)
        d_key, d_value, d_weights = _step_backward(problem, inner, d_step)
        d_weights = [(a + b).sum(0).to(w.dtype) for a, b, w in zip(d_fast, d_weights, weights, strict=True)]

        query_mask = mask if problem.mask_query else None
        d_query, d_conv_query = _convolve_backward(problem, d_query, raw_query, conv_query, query_mask)
        d_key, d_conv_key = _convolve_backward(problem, d_key, normed, conv_key, mask)
        d_key = _key_norm_backward(d_key, normed, saved.stats, mask)
        return Gradients(d_query, d_key, d_value, d_weights, d_rate, d_conv_query, d_conv_key)


# ---- the inner model -----------------------------------------------------------------------------------


class _Inner:
    """The activations that a gradient step makes: forward and backward need the same ones."""

    def __init__(
        self, problem: Problem, weights: Sequence[Tensor], key: Tensor, value: Tensor, mask: Tensor | None
    ) -> None:
        self.key, value, self.mask = zero_masked(key, mask), zero_masked(value, mask), mask
        self.weights = [w.to(key.dtype) for w in weights]
        self.w_out = self.weights[-1]
        self.gate = self.key @ self.weights[0]
        self.sigmoid = torch.sigmoid(self.gate)
        self.act = self.gate * self.sigmoid
        self.slope = self.sigmoid + self.act * (1 - self.sigmoid)  # silu'
        self.up = self.key @ self.weights[1] if problem.inner == "swiglu" else None
        self.hidden = self.act if self.up is None else self.act * self.up
        self.error = -value if problem.loss == "dot" else self.hidden @ self.w_out - value
        self.d_hidden = self.error @ self.w_out.mT


def _step(problem: Problem, x: _Inner) -> list[Tensor]:
    """G, [B, H, ...] for each weight."""
    d_act = x.d_hidden if x.up is None else x.d_hidden * x.up
    gradients = [x.key.mT @ (d_act * x.slope)]
    if x.up is not None:
        gradients.append(x.key.mT @ (x.d_hidden * x.act))
    return [*gradients, x.hidden.mT @ x.error]


def _apply_backward(
    problem: Problem, query: Tensor, fast: Sequence[Tensor], grad: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Cotangents of the queries and of the fast weights, each [B, H, ...]."""
    gate = query @ fast[0]
    sigmoid = torch.sigmoid(gate)
    act = gate * sigmoid
    slope = sigmoid + act * (1 - sigmoid)
    d_hidden = grad @ fast[-1].mT
    if problem.inner == "mlp":
        d_gate = d_hidden * slope
        return d_gate @ fast[0].mT, [query.mT @ d_gate, act.mT @ grad]
    up = query @ fast[1]
    d_gate, d_up = d_hidden * up * slope, d_hidden * act
    d_query = d_gate @ fast[0].mT + d_up @ fast[1].mT
    return d_query, [query.mT @ d_gate, query.mT @ d_up, (act * up).mT @ grad]


def _step_backward(problem: Problem, x: _Inner, d_step: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Cotangents of keys, values and weights (these per row, [B, H, ...]) given those of G."""
    curve = x.sigmoid * (1 - x.sigmoid) * (2 + x.gate * (1 - 2 * x.sigmoid))  # silu''
    from_gate = x.key @ d_step[0]
    d_error = x.hidden @ d_step[-1]
    d_hidden_forward = x.error @ d_step[-1].mT  # through G_out = hidden^T error
    if x.up is None:
        dd_hidden = from_gate * x.slope
        d_slope = from_gate * x.d_hidden
        d_key = (x.d_hidden * x.slope) @ d_step[0].mT
        d_act = torch.zeros_like(x.act)
        d_up = None
    else:
        from_up = x.key @ d_step[1]
        dd_hidden = from_gate * x.up * x.slope + from_up * x.act
        d_slope = from_gate * x.d_hidden * x.up
        d_key = (x.d_hidden * x.up * x.slope) @ d_step[0].mT + (x.d_hidden * x.act) @ d_step[1].mT
        d_act = from_up * x.d_hidden
        d_up = from_gate * x.d_hidden * x.slope
    d_error = d_error + dd_hidden @ x.w_out
    d_out = dd_hidden.mT @ x.error
    if problem.loss == "mse":  # the error looks at the prediction
        d_hidden_forward = d_hidden_forward + d_error @ x.w_out.mT
        d_out = d_out + x.hidden.mT @ d_error
    d_act = d_act + (d_hidden_forward if x.up is None else d_hidden_forward * x.up)
    d_gate = d_act * x.slope + d_slope * curve
    d_key = d_key + d_gate @ x.weights[0].mT
    d_weights = [x.key.mT @ d_gate]
    if x.up is not None and d_up is not None:
        d_up = d_up + d_hidden_forward * x.act
        d_key = d_key + d_up @ x.weights[1].mT
        d_weights.append(x.key.mT @ d_up)
    return zero_masked(d_key, x.mask), zero_masked(-d_error, x.mask), [*d_weights, d_out]


# ---- key norm and convolutions -------------------------------------------------------------------------


def _key_norm(problem: Problem, key: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """stats [B, H, 2, D] and the normed keys."""
    if mask is not None:
        check_mask(mask, key)
    key = zero_masked(key, mask)
    if problem.eps is None:
        return key.new_empty(*key.shape[:2], 2, 0), key
    count = _count(key, mask)
    mean = key.sum(2, keepdim=True) / count
    var = zero_masked(key - mean, mask).square().sum(2, keepdim=True) / count
    stats = torch.cat([mean, torch.rsqrt(var + problem.eps)], dim=2)
    return stats, _normed(key, stats, mask)


def _normed(key: Tensor, stats: Tensor, mask: Tensor | None) -> Tensor:
    if stats.shape[-1] == 0:
        return zero_masked(key, mask)
    mean, scale = (part.to(key.dtype) for part in stats.split(1, dim=2))
    return zero_masked((key - mean) * scale, mask)


def _key_norm_backward(d_normed: Tensor, normed: Tensor, stats: Tensor, mask: Tensor | None) -> Tensor:
    if stats.shape[-1] == 0:
        return d_normed
    count = _count(normed, mask)
    d_normed = zero_masked(d_normed, mask)
    mean = d_normed.sum(2, keepdim=True) / count
    along = (d_normed * normed).sum(2, keepdim=True) / count
    return zero_masked((d_normed - mean - normed * along) * stats[:, :, 1:].to(normed.dtype), mask)


def _convolve(
    problem: Problem,
    query: Tensor,
    key: Tensor,
    conv_query: Convolution | None,
    conv_key: Convolution | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if conv_query is not None:
        query_mask = mask if problem.mask_query else None
        query = dwc(query, conv_query.weight, conv_query.bias, problem.prefix, problem.grid, query_mask)
    if conv_key is not None:
        key = dwc(key, conv_key.weight, conv_key.bias, problem.prefix, problem.grid, mask)
    return query, key


def _convolve_backward(
    problem: Problem, d_out: Tensor, x: Tensor, conv: Convolution | None, mask: Tensor | None
) -> tuple[Tensor, Convolution | None]:
    """Cotangents of x and of the convolution. The identity beside the convolution passes ``d_out`` on."""
    if conv is None:
        return d_out, None
    batch, heads, _, dim = x.shape
    cells, axes = math.prod(problem.grid), len(problem.grid)

    def image(tokens: Tensor) -> Tensor:  # [B, H, N, D] -> [B, H*D, *grid]
        inside = tokens.narrow(2, problem.prefix, cells).transpose(2, 3)
        return inside.reshape(batch, heads * dim, *problem.grid)

    weight = conv.weight.to(x.dtype)
    d_image, d_weight, d_bias = torch.ops.aten.convolution_backward(
        image(d_out), image(zero_masked(x, mask)), weight, [heads * dim],
        [1] * axes, [side // 2 for side in weight.shape[2:]], [1] * axes, False, [0] * axes, heads * dim,
        [True, True, conv.bias is not None],
    )  # fmt: skip
    d_x = d_out.clone()
    d_x.narrow(2, problem.prefix, cells).add_(d_image.reshape(batch, heads, dim, cells).transpose(2, 3))
    grads = Convolution(d_weight.to(conv.weight.dtype), None if conv.bias is None else d_bias.to(conv.bias.dtype))
    return zero_masked(d_x, mask), grads


# ---- small things ----------------------------------------------------------------------------------------


def _count(x: Tensor, mask: Tensor | None) -> int | Tensor:
    count = token_count(x, mask)
    return count.view(-1, 1, 1, 1) if isinstance(count, Tensor) else count


def _factor(rate: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """rate / n, [B or 1, H, 1, 1]."""
    return rate.view(1, -1, 1, 1) / _count(key, mask)
