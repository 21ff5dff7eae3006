"""The launches of the backward pass.

    query^ and output's gradient --query_pass--> d query^, dW' (fast weights)
    dW' --scaled--> A;  key^ and residual --key_pass--> d key^, d value, d weights, d rate
    d query^, d key^ --convolve_back--> d query, d x_n, convolutions;  d x_n --norm_back--> d key

Here query^ and key^ are written once and read by all launches: with the convolution inside their loads, each of them
would walk over the taps again (docs/kernels-gpu.md counts the bytes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import triton_backward, triton_conv
from .configs import backward_launches
from .problem import Convolution, Gradients, Saved, Tensors, empty_tokens
from .triton_phases import (
    configured,
    low_weights,
    matrices,
    options,
    plain,
    prepare,
    residual,
    source,
)
from .triton_site import DTYPES, Site, padded, rows_of, strides, target_of


def backward(site: Site, tensors: Tensors, rate: Tensor, saved: Saved, grad: Tensor) -> Gradients:
    """See :meth:`t5fx.kernels.problem.Kernel.backward`."""
    weights, conv_query, conv_key = tensors.weights, tensors.conv_query, tensors.conv_key
    query, key, value, grad = map(rows_of, (*tensors[:3], grad.to(site.dtype)))
    fast = [weight.to(site.dtype) for weight in saved.fast]
    d_query, d_fast = _query_side(site, grad, query, fast, conv_query, saved.stats)

    counts = site.token_counts()
    peak = torch.stack([w.abs().amax((2, 3)) for w in d_fast]).amax(0).clamp(min=torch.finfo(torch.float32).tiny)
    scale = (peak * (rate.float()[None, :] / counts)).contiguous()
    sign = 1 if site.problem.loss == "dot" else -1
    slopes = [(sign * w / peak[:, :, None, None]).to(site.dtype) for w in d_fast]

    d_key, d_value, d_weights, met = _key_side(site, key, value, weights, slopes, scale, conv_key, saved.stats)
    d_weights = [(a.sum(0) + b).to(w.dtype) for a, b, w in zip(d_fast, d_weights, weights, strict=True)]
    d_query, d_conv_query = _tokens_back(site, query, d_query, conv_query, saved.stats, None)
    d_key, d_conv_key = _tokens_back(site, key, d_key, conv_key, saved.stats, scale)
    # W' = W - rate / n G, and <dW', G> = -(sum of de * e) in the scale of A: exact also where the rate is 0.
    d_rate = (met * peak / counts).sum(0)
    return Gradients(d_query, d_key, d_value, d_weights, d_rate, d_conv_query, d_conv_key)


def _unpacked(site: Site, parts: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The sum over the splits [rows, splits, parameters of a head] as one [B, H, ...] a weight."""
    total, found, offset = parts.sum(1), [], 0
    for weight in weights:
        shape = weight.shape[-2:]
        found.append(total[:, offset : offset + shape.numel()].view(site.batch, site.heads, *shape))
        offset += shape.numel()
    return found


def _programs(makes: str, slices: int) -> int:
    """Programs a split: one a slice of hidden units where weights are summed. Tokens need all slices in one."""
    if makes == "W":
        return slices
    if "W" in makes and slices > 1:
        raise AssertionError(f"a launch of {makes} can't hold {slices} slices: the table of configurations is wrong")
    return 1


def _parameters(weights: Sequence[Tensor]) -> int:
    return sum(weight.shape[-2:].numel() for weight in weights)


def _query_side(
    site: Site, grad: Tensor, query: Tensor, fast: Sequence[Tensor], convolution: Convolution | None, stats: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """d query^ (d query where there is no convolution) in query's dtype, and dW' in float32."""
    x = query if convolution is None else prepare(site, query, convolution, stats, of_key=False)
    d_x = empty_tokens(query) if convolution is None else torch.empty_like(query, memory_format=torch.contiguous_format)
    d_fast: list[Tensor] = []
    for makes in backward_launches(target_of(site.device), "query_pass", DTYPES[site.dtype], site.width):
        chosen = configured(site, f"query_pass {makes}")
        slices = site.slices(chosen.hidden)
        own = _programs(makes, slices["SLICES"])
        chunk, splits = site.chunks(site.queries)
        parts = grad.new_empty(site.rows, splits, _parameters(fast), dtype=torch.float32) if "W" in makes else d_x
        triton_backward.query_pass[(site.rows * own, splits)](
            x, *strides(x), DO=grad, o_batch=grad.stride(0), o_head=grad.stride(1), o_step=grad.stride(2),
            **matrices(site, fast), DX=d_x, dx_batch=d_x.stride(0), dx_head=d_x.stride(1), dx_step=d_x.stride(2),
            PARTS=parts, heads=site.heads, tokens=site.queries, chunk=chunk, splits=splits, SWIGLU=site.swiglu,
            TOKEN="T" in makes, WEIGHT="W" in makes, **site.sizes(), **slices, BLOCK=chosen.block,
            PRECISION=site.precision, **options(chosen),
        )  # fmt: skip
        if "W" in makes:
            d_fast = _unpacked(site, parts, fast)
    return d_x, d_fast


def _key_side(
    site: Site,
    key: Tensor,
    value: Tensor,
    weights: Sequence[Tensor],
    slopes: Sequence[Tensor],
    scale: Tensor,
    convolution: Convolution | None,
    stats: Tensor,
) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    """d key^ in the scale of ``slopes`` (d key where nothing was done to it), d value, the step's share of d weights
    [H, ...] in float32, and sum of de * e [B, H]."""
    low = low_weights(site, weights)
    k = prepare(site, key, convolution, stats, of_key=True)
    arguments = plain(site, k, of_key=True)
    error = residual(site, k, arguments, value, low)
    mse, final = site.problem.loss == "mse", convolution is None and site.problem.eps is None
    d_k = empty_tokens(key) if final else torch.empty(key.shape, dtype=key.dtype, device=key.device)
    d_value = empty_tokens(value)
    d_error = torch.empty(value.shape, dtype=value.dtype, device=value.device) if mse else value
    by_slope = {name.replace("W", "A"): slope for name, slope in matrices(site, slopes).items()}
    d_weights: list[Tensor] = []
    met = scale
    for makes in backward_launches(target_of(site.device), "key_pass", DTYPES[site.dtype], site.width, mse=mse):
        chosen = configured(site, f"key_pass {makes}")
        slices = site.slices(chosen.hidden)
        own = _programs(makes, slices["SLICES"])
        chunk, splits = site.chunks(site.tokens)
        f32: dict[str, Any] = {"dtype": torch.float32, "device": key.device}
        parts = torch.empty(site.rows, splits, _parameters(low) if "W" in makes else 0, **f32)
        rates = torch.empty(site.rows, splits, **f32)
        triton_backward.key_pass[(site.rows * own, splits)](
            k, *strides(k), E=error, e_batch=error.stride(0), e_head=error.stride(1), e_step=error.stride(2),
            MASK=arguments["MASK"], DE=d_error, **matrices(site, low), **by_slope, SCALE=scale,
            DK=d_k, dk_batch=d_k.stride(0), dk_head=d_k.stride(1), dk_step=d_k.stride(2),
            DV=d_value, dv_batch=d_value.stride(0), dv_head=d_value.stride(1), dv_step=d_value.stride(2),
            PARTS=parts, RATES=rates, heads=site.heads, tokens=site.tokens, chunk=chunk, splits=splits,
            SWIGLU=site.swiglu, RESIDUAL=mse, MASKED=arguments["MASKED"], VALUE="V" in makes, KEY="K" in makes,
            WEIGHT="W" in makes, FINAL=final, **site.sizes(), **slices, BLOCK=chosen.block,
            PRECISION=site.precision, **options(chosen),
        )  # fmt: skip
        if "W" in makes:
            d_weights = [part.sum(0) for part in _unpacked(site, parts, low)]
        if "V" in makes:
            met = rates.sum(1).view(site.batch, site.heads)
    return d_k, d_value, d_weights, met


def _tokens_back(
    site: Site, x: Tensor, gradient: Tensor, convolution: Convolution | None, stats: Tensor, scale: Tensor | None
) -> tuple[Tensor, Convolution | None]:
    """From the gradient of x^ to those of x and of the convolution. ``scale`` [B, H] for keys, None for queries."""
    of_key = scale is not None
    norm = of_key and site.problem.eps is not None
    if convolution is None and not norm:
        return gradient, None
    arguments = source(site, x, convolution, stats, of_key=of_key)
    chosen, tokens = configured(site, "convolve_back"), x.shape[2]
    chunk, splits = site.chunks(tokens)
    dims = {"D": site.head_dim, "DP": padded(site.head_dim)}
    result = empty_tokens(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if norm else result
    count = arguments["KT"] * arguments["KH"] * arguments["KW"] + 1
    f32: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    taps = torch.empty(site.rows, splits, count, site.head_dim, **f32)
    sums = torch.empty(site.rows, splits, 2, site.head_dim, **f32)
    triton_conv.convolve_back[(site.rows, splits)](
        x, *strides(x), G=gradient, g_batch=gradient.stride(0), g_head=gradient.stride(1), g_step=gradient.stride(2),
        **arguments, SCALE=stats if scale is None else scale,
        OUT=out, out_batch=out.stride(0), out_head=out.stride(1), out_step=out.stride(2), TAPS=taps, SUMS=sums,
        heads=site.heads, tokens=tokens, chunk=chunk, splits=splits, SCALED=of_key, **dims, TP=padded(count),
        BLOCK=chosen.block, **options(chosen),
    )  # fmt: skip
    if norm and scale is not None:
        counts = site.token_counts()  # [B, 1] under a mask
        means = sums.sum(1).view(site.batch, -1) / counts
        rest = configured(site, "norm_back")
        triton_conv.norm_back[(site.rows, -(-tokens // rest.block))](
            x, *strides(x), G=out, g_batch=out.stride(0), g_head=out.stride(1), g_step=out.stride(2),
            MASK=arguments["MASK"], STATS=stats, MEANS=means, SCALE=scale,
            OUT=result, out_batch=result.stride(0), out_head=result.stride(1), out_step=result.stride(2),
            heads=site.heads, tokens=tokens, MASKED=arguments["MASKED"], **dims, BLOCK=rest.block, **options(rest),
        )  # fmt: skip
    return result, _convolution_gradient(site, taps, convolution)


def _convolution_gradient(site: Site, taps: Tensor, convolution: Convolution | None) -> Convolution | None:
    """Sum over rows of the batch and splits: [B*H, splits, taps + 1, D] -> weight [H*D, 1, k, k], bias [H*D]."""
    if convolution is None:
        return None
    total = taps.view(site.batch, site.heads, *taps.shape[1:]).sum((0, 2))
    weight = total[:, :-1].transpose(1, 2).reshape(convolution.weight.shape).to(convolution.weight.dtype)
    if convolution.bias is None:
        return Convolution(weight, None)
    return Convolution(weight, total[:, -1].reshape(-1).to(convolution.bias.dtype))
