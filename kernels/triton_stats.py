"""Key statistics: mean and 1/sqrt(var + eps) of every channel over the tokens.

Two kernels. The first gives every split of the tokens its count, mean and sum of squared deviations; inside a split
the blocks are merged, and :func:`merge_stats` merges the splits in their order, both by the pairwise update of Chan,
Golub and LeVeque (1983). Nowhere is ``E[x^2] - E[x]^2`` formed, which at 65,536 tokens loses a variance that is small
beside the mean.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tokens import live_rows, load_rows


@triton.jit
def _merged(count, mean, square, count2, mean2, square2):
    """(count, mean, sum of squared deviations) of the union of two disjoint sets of tokens."""
    total = count + count2
    share = count2 / tl.maximum(total, 1.0)
    delta = mean2 - mean
    return total, mean + delta * share, square + square2 + delta * delta * (count * share)


@triton.jit(do_not_specialize=["tokens", "chunk", "splits"])
def part_stats(
    K,
    k_batch,
    k_head,
    k_step,
    MASK,
    PARTS,  # float32 [B*H, splits, 3, D]: count, mean, sum of squared deviations
    heads,
    tokens,
    chunk,
    splits,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row, head and split."""
    head = tl.program_id(0)
    split = tl.program_id(1)
    channel = tl.arange(0, DP)
    batch = (head // heads).to(tl.int64)
    base = batch * k_batch + (head % heads).to(tl.int64) * k_head
    end = tl.minimum(split * chunk + chunk, tokens)
    count = 0.0
    mean = tl.zeros((DP,), tl.float32)
    square = tl.zeros((DP,), tl.float32)
    for first in range(split * chunk, end, BLOCK):
        live = live_rows(MASK, batch * tokens, first, end, MASKED, BLOCK)
        x = load_rows(K, base, k_step, first, live, D, DP, BLOCK).to(tl.float32)
        here = tl.sum(live.to(tl.float32), 0)
        middle = tl.sum(x, 0) / tl.maximum(here, 1.0)
        apart = tl.where(live[:, None], x - middle[None, :], 0.0)
        count, mean, square = _merged(count, mean, square, here, middle, tl.sum(apart * apart, 0))
    at = PARTS + (head.to(tl.int64) * splits + split) * (3 * D) + channel
    tl.store(at, tl.zeros((DP,), tl.float32) + count, mask=channel < D)
    tl.store(at + D, mean, mask=channel < D)
    tl.store(at + 2 * D, square, mask=channel < D)


@triton.jit(do_not_specialize=["splits"])
def merge_stats(PARTS, STATS, splits, eps, D: tl.constexpr, DP: tl.constexpr):
    """STATS [B*H, 2, D] = mean, 1/sqrt(var + eps). One program a row and head."""
    head = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, DP)
    count = tl.zeros((DP,), tl.float32)
    mean = tl.zeros((DP,), tl.float32)
    square = tl.zeros((DP,), tl.float32)
    for split in range(splits):
        at = PARTS + (head * splits + split) * (3 * D) + channel
        count2 = tl.load(at, mask=channel < D, other=0.0)
        mean2 = tl.load(at + D, mask=channel < D, other=0.0)
        square2 = tl.load(at + 2 * D, mask=channel < D, other=0.0)
        count, mean, square = _merged(count, mean, square, count2, mean2, square2)
    rstd = 1.0 / tl.sqrt_rn(square / tl.maximum(count, 1.0) + eps)
    at = STATS + head * (2 * D) + channel
    tl.store(at, mean, mask=channel < D)
    tl.store(at + D, rstd, mask=channel < D)
