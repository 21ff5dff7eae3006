"""Device functions that all Triton kernels share: how a block of tokens is read, and how matrices are multiplied.

A site's tokens reach the inner model as ``x^ = x_n + DWC(x_n)``, with ``x_n`` the normalised key or the plain query.
:func:`load_tokens` makes a block of them straight from the strided input. A neighbour on the grid is normalised on
its own: ``where(valid, (x - mean) * rstd, 0)``. So the zero padding of the convolution holds at borders and at masked
tokens, and no normalised key has to exist in memory. The taps of one block overlap, so all but the first read of a
token come from the caches.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter multiplies bfloat16 bit patterns as integers and cuts where chips round to nearest even. There,
# operands are widened and rounded by hand.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """float32 x in another dtype, to nearest even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """``a @ b + acc`` in float32; acc may be None."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_matrix(W, offset, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A row-major matrix [ROWS, COLUMNS] at W + offset, zeros beyond it."""
    inside = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    return tl.load(W + offset + rows[:, None] * COLUMNS + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _row_offsets(base, step, first, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of a block of tokens: of its first one, 64 bits wide, and from there on [BLOCK, DP] of 32 bits.

    The launch code gives strides that are multiples of 8 where D is one. Said here, it lets heads of 72 channels be
    read 16 bytes at a time: what Triton finds out by itself are multiples of 16.
    """
    UNIT: tl.constexpr = 8 if D % 8 == 0 else 1
    start = tl.multiple_of(base + tl.cast(first, tl.int64) * step, UNIT)
    rows = tl.multiple_of(tl.arange(0, BLOCK) * step, UNIT)
    return start, rows[:, None] + tl.arange(0, DP)[None, :]


@triton.jit
def load_rows(X, base, step, first, live, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens first.. [BLOCK, DP] of one head as they are; zeros where not ``live`` and beyond D."""
    inside = live[:, None] & (tl.arange(0, DP) < D)[None, :]
    start, offsets = _row_offsets(base, step, first, D, DP, BLOCK)
    return tl.load(X + start + offsets, mask=inside, other=0.0)


@triton.jit
def store_rows(X, base, step, first, live, values, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr):
    """The reverse of :func:`load_rows`; ``values`` is rounded to X's dtype."""
    inside = live[:, None] & (tl.arange(0, DP) < D)[None, :]
    start, offsets = _row_offsets(base, step, first, D, DP, BLOCK)
    tl.store(X + start + offsets, rounded(values, X.dtype.element_ty), mask=inside)


@triton.jit
def live_rows(MASK, mask_base, first, end, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Which tokens of a block take part: bool [BLOCK]."""
    row = tl.arange(0, BLOCK)
    live = first + row < end
    if MASKED:
        live = live & (tl.load(MASK + mask_base + first + row, mask=live, other=0) != 0)
    return live


@triton.jit
def load_stats(STATS, head, D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr):
    """Mean and 1/sqrt(var + eps) of one row and head, float32 [DP] each."""
    channel = tl.arange(0, DP)
    mean = tl.zeros((DP,), tl.float32)
    rstd = tl.zeros((DP,), tl.float32)
    if NORM:
        at = STATS + head.to(tl.int64) * (2 * D) + channel
        mean = tl.load(at, mask=channel < D, other=0.0)
        rstd = tl.load(at + D, mask=channel < D, other=0.0)
    return mean, rstd


@triton.jit
def normalised(x, inside, mean, rstd, NORM: tl.constexpr):
    """float32 of a loaded block, standardised; zeros where not ``inside``."""
    x = x.to(tl.float32)
    if NORM:
        x = tl.where(inside, (x - mean[None, :]) * rstd[None, :], 0.0)
    return x


@triton.jit
def grid_cells(n, live, prefix, grid_t, grid_h, grid_w):
    """Whether tokens lie on the grid, and their coordinates (t, y, x) there."""
    cell = n - prefix
    on_grid = live & (cell >= 0) & (cell < grid_t * grid_h * grid_w)
    cell = tl.where(on_grid, cell, 0)
    line = cell // grid_w
    return on_grid, line // grid_h, line % grid_h, cell % grid_w


@triton.jit
def load_tokens(
    X,
    base,
    step,
    MASK,
    mask_base,
    CONV,
    BIAS,
    channels,  # head * D: where this head's channels begin
    mean,
    rstd,
    first,
    end,
    prefix,
    grid_t,
    grid_h,
    grid_w,
    NORM: tl.constexpr,
    MASKED: tl.constexpr,
    HIDE: tl.constexpr,  # masked tokens themselves give zeros too (keys); otherwise only their neighbours miss them
    BIASED: tl.constexpr,
    KT: tl.constexpr,  # sides of the convolution, 0 for none
    KH: tl.constexpr,
    KW: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``x^`` of the tokens first.. of one head, float32 [BLOCK, DP]; zeros from ``end`` on."""
    row = tl.arange(0, BLOCK)
    channel = tl.arange(0, DP)
    narrow = (channel < D)[None, :]
    live = live_rows(MASK, mask_base, first, end, MASKED, BLOCK)
    x = load_rows(X, base, step, first, live, D, DP, BLOCK)
    x = normalised(x, live[:, None] & narrow, mean, rstd, NORM)
    if KT > 0:
        on_grid, t, y, c = grid_cells(first + row, first + row < end, prefix, grid_t, grid_h, grid_w)
        moved = tl.zeros((BLOCK, DP), tl.float32)
        # Only one line of taps is unrolled: with all of them in flight at once the loads take all registers.
        for line in range(KT * KH):
            dt = line // KH - KT // 2
            dy = line % KH - KH // 2
            reached = on_grid & (y + dy >= 0) & (y + dy < grid_h) & (t + dt >= 0) & (t + dt < grid_t)
            for tap in tl.static_range(KW):
                dx = tap - KW // 2
                valid = reached & (c + dx >= 0) & (c + dx < grid_w)
                shifted = first + (dt * grid_h + dy) * grid_w + dx
                if MASKED:
                    valid = valid & (tl.load(MASK + mask_base + shifted + row, mask=valid, other=0) != 0)
                neighbour = load_rows(X, base, step, shifted, valid, D, DP, BLOCK)
                neighbour = normalised(neighbour, valid[:, None] & narrow, mean, rstd, NORM)
                at = CONV + (channels + channel) * (KT * KH * KW) + line * KW + tap
                weight = tl.load(at, mask=channel < D, other=0.0).to(tl.float32)
                moved += neighbour * weight[None, :]
        if BIASED:
            moved += tl.load(BIAS + channels + channel, mask=channel < D, other=0.0).to(tl.float32)[None, :]
        x += tl.where(on_grid[:, None], moved, 0.0)
    if HIDE and MASKED:
        x = tl.where(live[:, None], x, 0.0)
    return x


@triton.jit
def silu(z):
    """silu(z), silu'(z) and sigmoid(z)."""
    s = tl.sigmoid(z)
    a = z * s
    return a, s + a * (1 - s), s
