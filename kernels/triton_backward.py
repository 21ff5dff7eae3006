"""Backward kernels of the inner model and of its gradient step. Both make the activations again.

:func:`query_pass` goes through ``output = f(query^)``. With x the queries, o the output's gradient and silu' the slope:

    dh = o w3^T,  d2 = dh * silu(x w1),  d1 = dh * (x w2) * silu'(x w1)
    dx = d1 w1^T + d2 w2^T;   dW1 = x^T d1,  dW2 = x^T d2,  dW3 = h^T o          (w: the fast weights)

:func:`key_pass` goes through the gradients G of :func:`.triton_forward.inner_step`, given A_i = dL/dG_i. With k the
keys, e their residual, z1 = k w1, z2 = k w2, a = silu(z1), h = a z2, p = silu'(z1), dh = e w3^T:

    u1 = k A1,  u2 = k A2,  r = e A3^T                        what reaches (dh z2 p), (dh a) and h
    t  = u1 z2 p + u2 a                                       what reaches dh
    de = h A3 + t w3                                          and from it d value
    z2' = u1 dh p + r a,   z1' = (u2 dh + r z2) p + u1 dh z2 silu''(z1)
    dk = (dh z2 p) A1^T + (dh a) A2^T + z1' w1^T + z2' w2^T
    dw1 = k^T z1',  dw2 = k^T z2',  dw3 = t^T e

mse: e = h w3 - v depends on the weights and the keys. So de goes on: r += de w3^T and dw3 += h^T de. All of it is
linear in A, which the caller scales to at most 1 (in float16 ``rate / n_b`` times a gradient would vanish) and back.

VALUE, KEY and WEIGHT (in query_pass TOKEN and WEIGHT) choose which of the results a launch makes: all where they fit
into the registers. A launch with WEIGHT holds one slice of hidden units a program, one without goes over the slices.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tokens import dot, live_rows, load_matrix, load_rows, rounded, silu, store_rows

_COUNTS = ["heads", "tokens", "chunk", "splits"]


@triton.jit
def _query_slice(
    x, o, w1, w2, w3, dx, g1, g2, g3,
    SWIGLU: tl.constexpr, TOKEN: tl.constexpr, WEIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    act, slope, _ = silu(dot(x, w1, None, PRECISION))
    dh = dot(o, tl.trans(w3), None, PRECISION)
    if SWIGLU:
        up = dot(x, w2, None, PRECISION)
        d2 = rounded(dh * act, x.dtype)
        dh *= up
        act *= up
    d1 = rounded(dh * slope, x.dtype)
    if TOKEN:
        dx = dot(d1, tl.trans(w1), dx, PRECISION)
        if SWIGLU:
            dx = dot(d2, tl.trans(w2), dx, PRECISION)
    if WEIGHT:
        turned = tl.trans(x)
        g1 = dot(turned, d1, g1, PRECISION)
        if SWIGLU:
            g2 = dot(turned, d2, g2, PRECISION)
        g3 = dot(tl.trans(rounded(act, x.dtype)), o, g3, PRECISION)
    return dx, g1, g2, g3


@triton.jit
def _store_sums(
    PARTS, part, hidden, g1, g2, g3,
    SWIGLU: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """One slice of the matrices' sums, into float32 [parameters of a head] of part ``part``."""
    d = tl.arange(0, DP)
    v = tl.arange(0, VP)
    size = D * F * (2 if SWIGLU else 1) + F * V
    at = PARTS + part * size
    into = d[:, None] * F + hidden[None, :]
    inside = (d < D)[:, None] & (hidden < F)[None, :]
    tl.store(at + into, g1, mask=inside)
    if SWIGLU:
        tl.store(at + D * F + into, g2, mask=inside)
    at += size - F * V
    tl.store(at + hidden[:, None] * V + v[None, :], g3, mask=(hidden < F)[:, None] & (v < V)[None, :])


@triton.jit(do_not_specialize=_COUNTS)
def query_pass(
    X, x_batch, x_head, x_step,
    DO, o_batch, o_head, o_step,
    W1, W2, W3,  # fast weights [B, H, ...] in X's dtype
    DX, dx_batch, dx_head, dx_step,
    PARTS,  # float32 [B*H, splits, parameters of a head]
    heads, tokens, chunk, splits,
    SWIGLU: tl.constexpr, TOKEN: tl.constexpr, WEIGHT: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, F: tl.constexpr,
    HB: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of x^ = query^, and the sums that make the gradient of the fast weights."""
    # One slice a program where weights are summed; where tokens are, a program goes over all slices.
    OWN: tl.constexpr = SLICES if WEIGHT else 1
    own = tl.program_id(0) % OWN
    head = tl.program_id(0) // OWN
    split = tl.program_id(1)
    batch = (head // heads).to(tl.int64)
    index = (head % heads).to(tl.int64)
    d = tl.arange(0, DP)
    v = tl.arange(0, VP)
    which = head.to(tl.int64)
    hidden = own * HB + tl.arange(0, HB)
    w1 = load_matrix(W1, which * (D * F), d, hidden, D, F)
    w2 = w1
    if SWIGLU:
        w2 = load_matrix(W2, which * (D * F), d, hidden, D, F)
    w3 = load_matrix(W3, which * (F * V), hidden, v, F, V)
    g1, g2, g3 = 0.0, 0.0, 0.0
    if WEIGHT:
        g1 = tl.zeros((DP, HB), tl.float32)
        g3 = tl.zeros((HB, VP), tl.float32)
        if SWIGLU:
            g2 = tl.zeros((DP, HB), tl.float32)
    end = tl.minimum(split * chunk + chunk, tokens)
    for first in range(split * chunk, end, BLOCK):
        live = first + tl.arange(0, BLOCK) < end
        x = load_rows(X, batch * x_batch + index * x_head, x_step, first, live, D, DP, BLOCK)
        o = load_rows(DO, batch * o_batch + index * o_head, o_step, first, live, V, VP, BLOCK)
        dx = 0.0
        if TOKEN:
            dx = tl.zeros((BLOCK, DP), tl.float32)
        if WEIGHT or SLICES == 1:
            dx, g1, g2, g3 = _query_slice(x, o, w1, w2, w3, dx, g1, g2, g3, SWIGLU, TOKEN, WEIGHT, PRECISION)
        else:
            for j in range(SLICES):
                units = j * HB + tl.arange(0, HB)
                s1 = load_matrix(W1, which * (D * F), d, units, D, F)
                s2 = s1
                if SWIGLU:
                    s2 = load_matrix(W2, which * (D * F), d, units, D, F)
                s3 = load_matrix(W3, which * (F * V), units, v, F, V)
                dx, _, _, _ = _query_slice(x, o, s1, s2, s3, dx, 0.0, 0.0, 0.0, SWIGLU, True, False, PRECISION)
        if TOKEN:
            store_rows(DX, batch * dx_batch + index * dx_head, dx_step, first, live, dx, D, DP, BLOCK)
    if WEIGHT:
        _store_sums(PARTS, which * splits + split, hidden, g1, g2, g3, SWIGLU, D, DP, V, VP, F)


@triton.jit
def _key_slice(
    k, e, de_in, w1, w2, w3, a1, a2, a3, dk, de, g1, g2, g3,
    SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, VALUE: tl.constexpr, KEY: tl.constexpr, WEIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    z1 = dot(k, w1, None, PRECISION)
    act, slope, s = silu(z1)
    u1 = dot(k, a1, None, PRECISION)
    if SWIGLU:
        z2 = dot(k, w2, None, PRECISION)
        u2 = dot(k, a2, None, PRECISION)
        hidden = rounded(act * z2, k.dtype)
        t = rounded(u1 * z2 * slope + u2 * act, k.dtype)
    else:
        hidden = rounded(act, k.dtype)
        t = rounded(u1 * slope, k.dtype)
    if VALUE:
        de = dot(hidden, a3, de, PRECISION)
        de = dot(t, w3, de, PRECISION)
    if KEY or WEIGHT:
        dh = dot(e, tl.trans(w3), None, PRECISION)
        r = dot(e, tl.trans(a3), None, PRECISION)
        if RESIDUAL:
            r = dot(de_in, tl.trans(w3), r, PRECISION)
        bend = s * (1 - s) * (2 + z1 * (1 - 2 * s))  # silu''
        if SWIGLU:
            back2 = rounded(u1 * dh * slope + r * act, k.dtype)
            back1 = rounded((u2 * dh + r * z2) * slope + u1 * dh * z2 * bend, k.dtype)
        else:
            back1 = rounded(r * slope + u1 * dh * bend, k.dtype)
        if WEIGHT:
            turned = tl.trans(k)
            g1 = dot(turned, back1, g1, PRECISION)
            if SWIGLU:
                g2 = dot(turned, back2, g2, PRECISION)
            g3 = dot(tl.trans(t), e, g3, PRECISION)
            if RESIDUAL:
                g3 = dot(tl.trans(hidden), de_in, g3, PRECISION)
        if KEY:
            dk = dot(back1, tl.trans(w1), dk, PRECISION)
            if SWIGLU:
                dk = dot(back2, tl.trans(w2), dk, PRECISION)
                dk = dot(rounded(dh * act, k.dtype), tl.trans(a2), dk, PRECISION)
                dh *= z2
            dk = dot(rounded(dh * slope, k.dtype), tl.trans(a1), dk, PRECISION)
    return dk, de, g1, g2, g3


@triton.jit(do_not_specialize=_COUNTS)
def key_pass(
    K, k_batch, k_head, k_step,
    E, e_batch, e_head, e_step,
    MASK,
    DE,  # the residual's gradient [B, H, N, Dv] contiguous in K's dtype, in the scale of A: written with VALUE, for mse
    W1, W2, W3,  # learned weights [H, ...] in K's dtype
    A1, A2, A3,  # [B, H, ...] in K's dtype
    SCALE,  # float32 [B, H]: what takes results back from the scale of A
    DK, dk_batch, dk_head, dk_step,
    DV, dv_batch, dv_head, dv_step,
    PARTS,  # float32 [B*H, splits, parameters of a head]
    RATES,  # float32 [B*H, splits]: sum of de * e, which is what the rate's gradient is made of
    heads, tokens, chunk, splits,
    SWIGLU: tl.constexpr, RESIDUAL: tl.constexpr, MASKED: tl.constexpr,
    VALUE: tl.constexpr, KEY: tl.constexpr, WEIGHT: tl.constexpr,
    FINAL: tl.constexpr,  # DK is the key's own gradient, not that of x^ in the scale of A
    D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, F: tl.constexpr,
    HB: tl.constexpr, SLICES: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of k^, of the value, and the sums that make those of the learned weights."""
    OWN: tl.constexpr = SLICES if WEIGHT else 1
    own = tl.program_id(0) % OWN
    head = tl.program_id(0) // OWN
    split = tl.program_id(1)
    batch = (head // heads).to(tl.int64)
    index = (head % heads).to(tl.int64)
    d = tl.arange(0, DP)
    v = tl.arange(0, VP)
    row = head.to(tl.int64)
    hidden = own * HB + tl.arange(0, HB)
    w1 = load_matrix(W1, index * (D * F), d, hidden, D, F)
    a1 = load_matrix(A1, row * (D * F), d, hidden, D, F)
    w2, a2 = w1, a1
    if SWIGLU:
        w2 = load_matrix(W2, index * (D * F), d, hidden, D, F)
        a2 = load_matrix(A2, row * (D * F), d, hidden, D, F)
    w3 = load_matrix(W3, index * (F * V), hidden, v, F, V)
    a3 = load_matrix(A3, row * (F * V), hidden, v, F, V)
    scale = tl.load(SCALE + head)
    sign = -1.0 if RESIDUAL else 1.0  # e = f - v, or v with the sign of dot in A
    g1, g2, g3 = 0.0, 0.0, 0.0
    if WEIGHT:
        g1 = tl.zeros((DP, HB), tl.float32)
        g3 = tl.zeros((HB, VP), tl.float32)
        if SWIGLU:
            g2 = tl.zeros((DP, HB), tl.float32)
    rates = tl.zeros((BLOCK,), tl.float32)
    end = tl.minimum(split * chunk + chunk, tokens)
    for first in range(split * chunk, end, BLOCK):
        inside = first + tl.arange(0, BLOCK) < end
        live = live_rows(MASK, batch * tokens, first, end, MASKED, BLOCK)
        k = load_rows(K, batch * k_batch + index * k_head, k_step, first, live, D, DP, BLOCK)
        e = load_rows(E, batch * e_batch + index * e_head, e_step, first, live, V, VP, BLOCK)
        de_in = e
        if RESIDUAL and (KEY or WEIGHT):
            de_in = load_rows(DE, row * tokens * V, V, first, live, V, VP, BLOCK)
        dk, de = 0.0, 0.0
        if KEY:
            dk = tl.zeros((BLOCK, DP), tl.float32)
        if VALUE:
            de = tl.zeros((BLOCK, VP), tl.float32)
        if WEIGHT or SLICES == 1:
            dk, de, g1, g2, g3 = _key_slice(
                k, e, de_in, w1, w2, w3, a1, a2, a3, dk, de, g1, g2, g3,
                SWIGLU, RESIDUAL, VALUE, KEY, WEIGHT, PRECISION,
            )  # fmt: skip
        else:
            for j in range(SLICES):
                units = j * HB + tl.arange(0, HB)
                s1 = load_matrix(W1, index * (D * F), d, units, D, F)
                b1 = load_matrix(A1, row * (D * F), d, units, D, F)
                s2, b2 = s1, b1
                if SWIGLU:
                    s2 = load_matrix(W2, index * (D * F), d, units, D, F)
                    b2 = load_matrix(A2, row * (D * F), d, units, D, F)
                s3 = load_matrix(W3, index * (F * V), units, v, F, V)
                b3 = load_matrix(A3, row * (F * V), units, v, F, V)
                dk, de, _, _, _ = _key_slice(
                    k, e, de_in, s1, s2, s3, b1, b2, b3, dk, de, 0.0, 0.0, 0.0,
                    SWIGLU, RESIDUAL, VALUE, KEY, False, PRECISION,
                )  # fmt: skip
        if VALUE:
            store_rows(
                DV, batch * dv_batch + index * dv_head, dv_step, first, inside, de * (scale * sign), V, VP, BLOCK
            )
            if RESIDUAL:
                store_rows(DE, row * tokens * V, V, first, inside, de, V, VP, BLOCK)
            rates += tl.sum(de * e.to(tl.float32), 1)
        if KEY:
            if FINAL:
                dk *= scale
            store_rows(DK, batch * dk_batch + index * dk_head, dk_step, first, inside, dk, D, DP, BLOCK)
    part = row * splits + split
    if VALUE:
        tl.store(RATES + part, tl.sum(rates, 0))
    if WEIGHT:
        if SWIGLU:
            g2 *= scale
        _store_sums(PARTS, part, hidden, g1 * scale, g2, g3 * scale, SWIGLU, D, DP, V, VP, F)
