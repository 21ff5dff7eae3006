"""Forward kernels: the inner step in partial sums over the tokens, the fast weights from them, and the inner model.

SwiGLU, in the terms of :mod:`t5fx.inner`: with k the keys of a block and e its residual, h = silu(k w1) * (k w2),

    dh = e w3^T,  G1 += k^T (dh * (k w2) * silu'(k w1)),  G2 += k^T (dh * silu(k w1)),  G3 += h^T e

All of it stays on the chip; only the three sums are written, once a split. The MLP is the same with ``k w2`` taken as 1
and no G2. The dot loss passes ``value`` as e and turns the sign in :func:`fast_weights`; mse passes the residual that
:func:`apply_model` wrote. The splits are added in their order, so results do not change from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tokens import (
    dot,
    live_rows,
    load_matrix,
    load_rows,
    load_stats,
    load_tokens,
    rounded,
    silu,
    store_rows,
)

_COUNTS = ["heads", "tokens", "chunk", "splits", "prefix", "grid_t", "grid_h", "grid_w"]


@triton.jit(do_not_specialize=_COUNTS)
def prepare_tokens(
    X, x_batch, x_head, x_step,
    MASK, STATS, CONV, BIAS,
    OUT, out_batch, out_head, out_step,
    heads, tokens, prefix, grid_t, grid_h, grid_w,
    NORM: tl.constexpr, MASKED: tl.constexpr, HIDE: tl.constexpr, BIASED: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT = x^, in OUT's dtype: for kernels that read it more than once, or have no registers left to make it."""
    head = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    batch = (head // heads).to(tl.int64)
    index = head % heads
    mean, rstd = load_stats(STATS, head, D, DP, NORM)
    x = load_tokens(
        X, batch * x_batch + index.to(tl.int64) * x_head, x_step, MASK, batch * tokens, CONV, BIAS, index * D,
        mean, rstd, first, tokens, prefix, grid_t, grid_h, grid_w,
        NORM, MASKED, HIDE, BIASED, KT, KH, KW, D, DP, BLOCK,
    )  # fmt: skip
    live = first + tl.arange(0, BLOCK) < tokens
    store_rows(OUT, batch * out_batch + index.to(tl.int64) * out_head, out_step, first, live, x, D, DP, BLOCK)


@triton.jit(do_not_specialize=_COUNTS)
def inner_step(
    K, k_batch, k_head, k_step,
    E, e_batch, e_head, e_step,
    MASK, STATS, CONV, BIAS, W1, W2, W3,
    PARTS,  # float32 [B*H, splits, parameters of a head]
    heads, tokens, chunk, splits, prefix, grid_t, grid_h, grid_w,
    SWIGLU: tl.constexpr, NORM: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, F: tl.constexpr,
    HB: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a row, head, slice of HB hidden units, and split."""
    hidden = (tl.program_id(0) % SLICES) * HB + tl.arange(0, HB)
    head = tl.program_id(0) // SLICES
    split = tl.program_id(1)
    batch = (head // heads).to(tl.int64)
    index = head % heads
    d = tl.arange(0, DP)
    v = tl.arange(0, VP)
    w1 = load_matrix(W1, index * (D * F), d, hidden, D, F)
    w3 = load_matrix(W3, index * (F * V), hidden, v, F, V)
    if SWIGLU:
        w2 = load_matrix(W2, index * (D * F), d, hidden, D, F)
        g2 = tl.zeros((DP, HB), tl.float32)
    g1 = tl.zeros((DP, HB), tl.float32)
    g3 = tl.zeros((HB, VP), tl.float32)
    mean, rstd = load_stats(STATS, head, D, DP, NORM)
    end = tl.minimum(split * chunk + chunk, tokens)
    for first in range(split * chunk, end, BLOCK):
        k_hat = load_tokens(
            K, batch * k_batch + index.to(tl.int64) * k_head, k_step, MASK, batch * tokens, CONV, BIAS, index * D,
            mean, rstd, first, end, prefix, grid_t, grid_h, grid_w,
            NORM, MASKED, True, BIASED, KT, KH, KW, D, DP, BLOCK,
        )  # fmt: skip
        k = rounded(k_hat, K.dtype.element_ty)
        live = live_rows(MASK, batch * tokens, first, end, MASKED, BLOCK)
        e = load_rows(E, batch * e_batch + index.to(tl.int64) * e_head, e_step, first, live, V, VP, BLOCK)
        act, slope, _ = silu(dot(k, w1, None, PRECISION))
        dh = dot(e, tl.trans(w3), None, PRECISION)
        turned = tl.trans(k)
        if SWIGLU:
            up = dot(k, w2, None, PRECISION)
            g2 = dot(turned, rounded(dh * act, k.dtype), g2, PRECISION)
            dh *= up
            act *= up
        g1 = dot(turned, rounded(dh * slope, k.dtype), g1, PRECISION)
        g3 = dot(tl.trans(rounded(act, k.dtype)), e, g3, PRECISION)
    size = D * F * (2 if SWIGLU else 1) + F * V
    part = PARTS + (head.to(tl.int64) * splits + split) * size
    into = d[:, None] * F + hidden[None, :]
    inside = (d < D)[:, None] & (hidden < F)[None, :]
    tl.store(part + into, g1, mask=inside)
    if SWIGLU:
        tl.store(part + D * F + into, g2, mask=inside)
    part += size - F * V
    tl.store(part + hidden[:, None] * V + v[None, :], g3, mask=(hidden < F)[:, None] & (v < V)[None, :])


@triton.jit(do_not_specialize=["heads", "splits", "offset"])
def fast_weights(
    W, PARTS, FACTOR, FAST, LOW,
    heads, splits, offset, total,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """FAST = W - FACTOR * (sum of PARTS), float32, and LOW the same in the dtype that GEMMs take.

    FACTOR [B, H] float32 is ``rate / n_b`` with the sign of the loss; ``offset`` is where this weight begins among
    the ``total`` parameters of a head.
    """
    head = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    part = PARTS + head.to(tl.int64) * splits * total + offset
    gradient = tl.zeros((BLOCK,), tl.float32)
    for split in range(splits):
        gradient += tl.load(part + split * total + at, mask=inside, other=0.0)
    weight = tl.load(W + (head % heads) * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    fast = weight - tl.load(FACTOR + head) * gradient
    tl.store(FAST + head.to(tl.int64) * SIZE + at, fast, mask=inside)
    tl.store(LOW + head.to(tl.int64) * SIZE + at, rounded(fast, LOW.dtype.element_ty), mask=inside)


@triton.jit
def _run_slice(x, w1, w2, w3, acc, SWIGLU: tl.constexpr, PRECISION: tl.constexpr):
    act, _, _ = silu(dot(x, w1, None, PRECISION))
    if SWIGLU:
        act *= dot(x, w2, None, PRECISION)
    return dot(rounded(act, x.dtype), w3, acc, PRECISION)


@triton.jit(do_not_specialize=_COUNTS)
def apply_model(
    X, x_batch, x_head, x_step,
    VALUE, v_batch, v_head, v_step,
    MASK, STATS, CONV, BIAS, W1, W2, W3, w_batch, w_head,
    OUT, out_batch, out_head, out_step,
    heads, tokens, chunk, prefix, grid_t, grid_h, grid_w,
    SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr, MASKED: tl.constexpr, HIDE: tl.constexpr,
    BIASED: tl.constexpr, KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, F: tl.constexpr,
    HB: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """OUT = f(x^), or f(x^) - value with RESIDUAL. One program a row, head and split of the tokens.

    Weights in X's dtype; matrix m of head h and row b begins at ``(b * w_batch + h * w_head) * size of m``, so that
    one kernel takes fast weights (H, 1) and learned weights (0, 1).
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    batch = (head // heads).to(tl.int64)
    index = head % heads
    which = batch * w_batch + index * w_head
    d = tl.arange(0, DP)
    v = tl.arange(0, VP)
    mean, rstd = load_stats(STATS, head, D, DP, NORM)
    end = tl.minimum(split * chunk + chunk, tokens)
    if SLICES == 1:
        hidden = tl.arange(0, HB)
        w1 = load_matrix(W1, which * (D * F), d, hidden, D, F)
        w2 = w1
        if SWIGLU:
            w2 = load_matrix(W2, which * (D * F), d, hidden, D, F)
        w3 = load_matrix(W3, which * (F * V), hidden, v, F, V)
    for first in range(split * chunk, end, BLOCK):
        x_hat = load_tokens(
            X, batch * x_batch + index.to(tl.int64) * x_head, x_step, MASK, batch * tokens, CONV, BIAS, index * D,
            mean, rstd, first, end, prefix, grid_t, grid_h, grid_w,
            NORM, MASKED, HIDE, BIASED, KT, KH, KW, D, DP, BLOCK,
        )  # fmt: skip
        x = rounded(x_hat, X.dtype.element_ty)
        out = tl.zeros((BLOCK, VP), tl.float32)
        if SLICES == 1:
            out = _run_slice(x, w1, w2, w3, out, SWIGLU, PRECISION)
        else:
            for j in range(SLICES):
                hidden = j * HB + tl.arange(0, HB)
                w1 = load_matrix(W1, which * (D * F), d, hidden, D, F)
                w2 = w1
                if SWIGLU:
                    w2 = load_matrix(W2, which * (D * F), d, hidden, D, F)
                w3 = load_matrix(W3, which * (F * V), hidden, v, F, V)
                out = _run_slice(x, w1, w2, w3, out, SWIGLU, PRECISION)
        if RESIDUAL:
            live = live_rows(MASK, batch * tokens, first, end, MASKED, BLOCK)
            base = batch * v_batch + index.to(tl.int64) * v_head
            out -= load_rows(VALUE, base, v_step, first, live, V, VP, BLOCK).to(tl.float32)
        inside = first + tl.arange(0, BLOCK) < end
        base = batch * out_batch + index.to(tl.int64) * out_head
        store_rows(OUT, base, out_step, first, inside, out, V, VP, BLOCK)
