"""Backward of how x^ was made: the transposed convolution, the convolution's own gradients, and the key norm.

With g = d x^ and x_n the normalised key (or the plain query), zero at masked tokens:

    d x_n[m] = g[m] + sum_t w[t] g[m - t],     dw[t] = sum_m x_n[m] g[m - t],     db = sum_m g[m]

over the grid, so one walk over the taps of g serves both. The key norm then needs two sums over the tokens,
``S1 = sum d x_n`` and ``S2 = sum d x_n * x_n``, which the same kernel leaves as partial sums:

    d key = rstd * (d x_n - S1 / n_b - x_n * S2 / n_b)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tokens import grid_cells, live_rows, load_rows, load_stats, normalised, store_rows

_COUNTS = ["heads", "tokens", "chunk", "splits", "prefix", "grid_t", "grid_h", "grid_w"]


@triton.jit(do_not_specialize=_COUNTS)
def convolve_back(
    X, x_batch, x_head, x_step,
    G, g_batch, g_head, g_step,
    MASK, STATS, CONV,
    BIAS,  # not read: the same arguments make x^
    SCALE,  # float32 [B, H] where SCALED: what takes G back to its scale
    OUT, out_batch, out_head, out_step,
    TAPS,  # float32 [B*H, splits, taps + 1, D]: the convolution's gradient, its bias in the last row
    SUMS,  # float32 [B*H, splits, 2, D]: S1 and S2 in G's scale
    heads, tokens, chunk, splits, prefix, grid_t, grid_h, grid_w,
    NORM: tl.constexpr, MASKED: tl.constexpr, BIASED: tl.constexpr, SCALED: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, TP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT = d x_n (in G's scale with NORM, for :func:`norm_back`), and the sums. One program a row, head, split."""
    head = tl.program_id(0)
    split = tl.program_id(1)
    batch = (head // heads).to(tl.int64)
    index = head % heads
    x_base = batch * x_batch + index.to(tl.int64) * x_head
    g_base = batch * g_batch + index.to(tl.int64) * g_head
    row = tl.arange(0, BLOCK)
    channel = tl.arange(0, DP)
    tap_row = tl.arange(0, TP)
    narrow = (channel < D)[None, :]
    mean, rstd = load_stats(STATS, head, D, DP, NORM)
    scale = 1.0
    if SCALED:
        scale = tl.load(SCALE + head)
    taps = tl.zeros((TP, DP), tl.float32)
    sum1 = tl.zeros((DP,), tl.float32)
    sum2 = tl.zeros((DP,), tl.float32)
    end = tl.minimum(split * chunk + chunk, tokens)
    for first in range(split * chunk, end, BLOCK):
        inside = first + row < end
        live = live_rows(MASK, batch * tokens, first, end, MASKED, BLOCK)
        x = load_rows(X, x_base, x_step, first, live, D, DP, BLOCK)
        x = normalised(x, live[:, None] & narrow, mean, rstd, NORM)
        g = load_rows(G, g_base, g_step, first, inside, D, DP, BLOCK).to(tl.float32)
        if KT > 0:
            on_grid, t, y, c = grid_cells(first + row, inside, prefix, grid_t, grid_h, grid_w)
            on = tl.sum(tl.where(on_grid[:, None], g, 0.0), 0)
            taps += tl.where(tap_row[:, None] == KT * KH * KW, on[None, :], 0.0)
            # One line of taps at a time, as in load_tokens. x meets g[m - t]: the taps the other way round.
            for line in range(KT * KH):
                dt = KT // 2 - line // KH
                dy = KH // 2 - line % KH
                reached = on_grid & (y + dy >= 0) & (y + dy < grid_h) & (t + dt >= 0) & (t + dt < grid_t)
                for place in tl.static_range(KW):
                    dx = KW // 2 - place
                    tap = line * KW + place
                    valid = reached & (c + dx >= 0) & (c + dx < grid_w)
                    shifted = first + (dt * grid_h + dy) * grid_w + dx
                    there = load_rows(G, g_base, g_step, shifted, valid, D, DP, BLOCK).to(tl.float32)
                    at = CONV + (index * D + channel) * (KT * KH * KW) + tap
                    weight = tl.load(at, mask=channel < D, other=0.0).to(tl.float32)
                    g += there * weight[None, :]
                    met = tl.sum(there * x, 0)
                    taps += tl.where(tap_row[:, None] == tap, met[None, :], 0.0)
        if MASKED:
            g = tl.where(live[:, None], g, 0.0)
        if NORM:
            sum1 += tl.sum(g, 0)
            sum2 += tl.sum(g * x, 0)
        else:
            g *= scale
        store_rows(OUT, batch * out_batch + index.to(tl.int64) * out_head, out_step, first, inside, g, D, DP, BLOCK)
    part = head.to(tl.int64) * splits + split
    if KT > 0:
        kept = (tap_row < KT * KH * KW + 1)[:, None] & narrow
        at = TAPS + part * ((KT * KH * KW + 1) * D) + tap_row[:, None] * D + channel[None, :]
        tl.store(at, taps * scale, mask=kept)
    if NORM:
        tl.store(SUMS + part * (2 * D) + channel, sum1, mask=channel < D)
        tl.store(SUMS + part * (2 * D) + D + channel, sum2, mask=channel < D)


@triton.jit(do_not_specialize=_COUNTS)
def norm_back(
    X, x_batch, x_head, x_step,
    G, g_batch, g_head, g_step,
    MASK, STATS,
    MEANS,  # float32 [B*H, 2, D]: S1 / n_b and S2 / n_b in G's scale
    SCALE,
    OUT, out_batch, out_head, out_step,
    heads, tokens,
    MASKED: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """OUT = d key from G = d x_n; zeros at masked tokens."""
    head = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    batch = (head // heads).to(tl.int64)
    index = (head % heads).to(tl.int64)
    channel = tl.arange(0, DP)
    mean, rstd = load_stats(STATS, head, D, DP, True)
    mean1, mean2 = load_stats(MEANS, head, D, DP, True)
    live = live_rows(MASK, batch * tokens, first, tokens, MASKED, BLOCK)
    x = load_rows(X, batch * x_batch + index * x_head, x_step, first, live, D, DP, BLOCK)
    x = normalised(x, live[:, None] & (channel < D)[None, :], mean, rstd, True)
    g = load_rows(G, batch * g_batch + index * g_head, g_step, first, live, D, DP, BLOCK).to(tl.float32)
    g = (g - mean1[None, :] - x * mean2[None, :]) * (rstd * tl.load(SCALE + head))[None, :]
    g = tl.where(live[:, None], g, 0.0)
    inside = first + tl.arange(0, BLOCK) < tokens
    store_rows(OUT, batch * out_batch + index * out_head, out_step, first, inside, g, D, DP, BLOCK)
