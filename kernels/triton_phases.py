"""The launches of the forward pass, one function a phase; backward makes activations again with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import triton_forward, triton_stats
from .configs import Config, config
from .problem import Convolution, Tensors
from .triton_site import DTYPES, Site, padded, rows_of, strides, taps, target_of


def configured(site: Site, kernel: str) -> Config:
    """The table's row for a kernel; :meth:`TritonKernel.refuse` has made sure that there is one."""
    found = config(target_of(site.device), kernel, DTYPES[site.dtype], site.width)
    if found is None:
        raise AssertionError(f"no configuration for {kernel} on {target_of(site.device)} at width {site.width}")
    return found


def options(chosen: Config) -> dict[str, int]:
    found = {"num_warps": chosen.warps, "num_stages": chosen.stages}
    return found if chosen.registers is None else {**found, "maxnreg": chosen.registers}


def source(site: Site, x: Tensor, convolution: Convolution | None, stats: Tensor, *, of_key: bool) -> dict[str, Any]:
    """The arguments of ``load_tokens``: how x^ is made from x."""
    masked = site.mask is not None and (of_key or (site.problem.mask_query and convolution is not None))
    norm = of_key and site.problem.eps is not None
    bias = None if convolution is None else convolution.bias
    return {
        "MASK": site.mask if masked else x,
        "STATS": stats if norm else x,
        "CONV": x if convolution is None else convolution.weight.contiguous(),
        "BIAS": x if bias is None else bias.contiguous(),
        **taps(site.problem, convolution),
        "NORM": norm,
        "MASKED": masked,
        "BIASED": bias is not None,
    }


def plain(site: Site, x: Tensor, *, of_key: bool) -> dict[str, Any]:
    """The same for tokens that :func:`prepare` has made."""
    masked = of_key and site.mask is not None
    return {
        "MASK": site.mask if masked else x,
        "STATS": x,
        "CONV": x,
        "BIAS": x,
        **taps(site.problem, None),
        "NORM": False,
        "MASKED": masked,
        "BIASED": False,
    }


def statistics(site: Site, key: Tensor) -> Tensor:
    """Mean and 1/sqrt(var + eps) of the keys: float32 [B, H, 2, D]; empty without key norm."""
    if site.problem.eps is None:
        return key.new_empty(0, dtype=torch.float32)
    key, chosen = rows_of(key), configured(site, "part_stats")
    chunk, splits = site.chunks(site.tokens)
    dims = {"D": site.head_dim, "DP": padded(site.head_dim)}
    parts = key.new_empty(site.rows, splits, 3, site.head_dim, dtype=torch.float32)
    stats = key.new_empty(site.batch, site.heads, 2, site.head_dim, dtype=torch.float32)
    triton_stats.part_stats[(site.rows, splits)](
        key, *strides(key), key if site.mask is None else site.mask, parts, site.heads, site.tokens, chunk, splits,
        MASKED=site.mask is not None, **dims, BLOCK=chosen.block, **options(chosen),
    )  # fmt: skip
    triton_stats.merge_stats[(site.rows,)](parts, stats, splits, float(site.problem.eps), **dims, num_warps=1)
    return stats


def prepare(site: Site, x: Tensor, convolution: Convolution | None, stats: Tensor, *, of_key: bool) -> Tensor:
    """x^ [B, H, N, D] in x's dtype. x itself where nothing is to be done to it."""
    x, arguments = rows_of(x), source(site, x, convolution, stats, of_key=of_key)
    if not (arguments["NORM"] or arguments["MASKED"] or arguments["KT"]):
        return x
    chosen, tokens = configured(site, "prepare_tokens"), x.shape[2]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    triton_forward.prepare_tokens[(site.rows, -(-tokens // chosen.block))](
        x, *strides(x), **arguments, OUT=out, out_batch=out.stride(0), out_head=out.stride(1), out_step=out.stride(2),
        heads=site.heads, tokens=tokens, HIDE=of_key, D=site.head_dim, DP=padded(site.head_dim), BLOCK=chosen.block,
        **options(chosen),
    )  # fmt: skip
    return out


def tokens_for(
    site: Site, kernel: str, x: Tensor, convolution: Convolution | None, stats: Tensor, *, of_key: bool
) -> tuple[Tensor, dict[str, Any]]:
    """What a kernel reads as its tokens: x with how to make x^ of it, or x^ that was made."""
    x = rows_of(x)
    if convolution is None or configured(site, kernel).convolve:
        return x, source(site, x, convolution, stats, of_key=of_key)
    made = prepare(site, x, convolution, stats, of_key=of_key)
    return made, plain(site, made, of_key=of_key)


def low_weights(site: Site, weights: Sequence[Tensor]) -> list[Tensor]:
    """Learned weights in the dtype that GEMMs take."""
    return [weight.to(site.dtype).contiguous() for weight in weights]


def matrices(site: Site, weights: Sequence[Tensor]) -> dict[str, Tensor]:
    """W1, W2, W3 as the kernels name them: an MLP has no second matrix into its hidden layer."""
    return {"W1": weights[0], "W2": weights[1 if site.swiglu else 0], "W3": weights[-1]}


def run_model(
    site: Site,
    x: Tensor,
    arguments: dict[str, Any],
    weights: Sequence[Tensor],
    out: Tensor,
    value: Tensor | None,
    *,
    of_key: bool,
) -> None:
    """``out = f(x^)``, minus ``value`` if there is one. Weights [H, ...] or [B, H, ...], in x's dtype."""
    chosen, tokens = configured(site, "apply_model"), x.shape[2]
    chunk, splits = site.chunks(tokens)
    other = x if value is None else value
    per_row = weights[0].ndim == 4
    triton_forward.apply_model[(site.rows, splits)](
        x, *strides(x), VALUE=other, v_batch=other.stride(0), v_head=other.stride(1), v_step=other.stride(2),
        **arguments, **matrices(site, weights), w_batch=site.heads if per_row else 0, w_head=1,
        OUT=out, out_batch=out.stride(0), out_head=out.stride(1), out_step=out.stride(2),
        heads=site.heads, tokens=tokens, chunk=chunk, SWIGLU=site.swiglu, RESIDUAL=value is not None, HIDE=of_key,
        **site.sizes(), **site.slices(chosen.hidden), BLOCK=chosen.block, PRECISION=site.precision, **options(chosen),
    )  # fmt: skip


def residual(site: Site, key: Tensor, arguments: dict[str, Any], value: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """``e`` up to its sign: the value itself for dot, ``f(key) - value`` for mse, [B, H, N, Dv] in value's dtype."""
    if site.problem.loss == "dot":
        return value
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    run_model(site, key, arguments, weights, out, value, of_key=True)
    return out


def step(site: Site, tensors: Tensors, rate: Tensor, stats: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The fast weights [B, H, ...] in float32, and again in the dtype that GEMMs take."""
    weights = tensors.weights
    chosen, low = configured(site, "inner_step"), low_weights(site, weights)
    key, arguments = tokens_for(site, "inner_step", tensors.key, tensors.conv_key, stats, of_key=True)
    error = residual(site, key, arguments, rows_of(tensors.value), low)
    slices = site.slices(chosen.hidden)
    chunk, splits = site.chunks(site.tokens)
    total = sum(weight[0].numel() for weight in weights)
    parts = key.new_empty(site.rows, splits, total, dtype=torch.float32)
    triton_forward.inner_step[(site.rows * slices["SLICES"], splits)](
        key, *strides(key), E=error, e_batch=error.stride(0), e_head=error.stride(1), e_step=error.stride(2),
        **arguments, **matrices(site, low), PARTS=parts, heads=site.heads, tokens=site.tokens, chunk=chunk,
        splits=splits, SWIGLU=site.swiglu, **site.sizes(), **slices, BLOCK=chosen.block, PRECISION=site.precision,
        **options(chosen),
    )  # fmt: skip
    sign = -1 if site.problem.loss == "dot" else 1
    factor = (sign * rate.float()[None, :] / site.token_counts()).expand(site.batch, site.heads).contiguous()
    fast, rounded, offset = [], [], 0
    for weight in weights:
        size = weight[0].numel()
        fast.append(key.new_empty(site.batch, *weight.shape, dtype=torch.float32))
        rounded.append(fast[-1] if site.dtype == torch.float32 else torch.empty_like(fast[-1], dtype=site.dtype))
        triton_forward.fast_weights[(site.rows, -(-size // 1024))](
            weight.contiguous(), parts, factor, fast[-1], rounded[-1], site.heads, splits, offset, total,
            SIZE=size, BLOCK=1024, num_warps=4,
        )  # fmt: skip
        offset += size
    return fast, rounded


def apply(site: Site, query: Tensor, fast: Sequence[Tensor], conv_query: Convolution | None, output: Tensor) -> None:
    """``output = f(query^)`` with the fast weights [B, H, ...] in query's dtype."""
    x, arguments = tokens_for(site, "apply_model", query, conv_query, query, of_key=False)
    run_model(site, x, arguments, fast, output, None, of_key=False)
