// The inner step's backward on one block of tokens: derivatives of the weights' gradients.
//
// Forward formed G = sum over tokens of (x^T g, h^T e); its cotangent is C, one matrix a weight, laid out as weights.
// With u = x C_in, r = e C_out^T and dh = e out^T, the block adds  sum(u1 g1 + u2 g2 + r h)  to <C, G>, whose
// derivatives at dh, z2 and z1 are (silu, silu', silu'' at z1 written a, a', a'')
//
//     ddh = u1 z2 a' + u2 a
//     dz2 = u1 dh a' + r a                dz1 = u1 dh z2 a'' + u2 dh a' + r z2 a'
//     de  = h C_out + ddh out             dx  = g C_in^T + dz in^T
//     d in = x^T dz                       d out = ddh^T e
//
// mlp has z2 = 1 and no second column. For mse e = h out - value, so de flows on: r grows by de out^T, d out by h^T de,
// and dvalue = -de. For dot e stands for the value itself, and the caller turns the sign of C.
#pragma once

#include "inner.h"

namespace t5fx {

// g and h as in inner.h, ddh, and each lane's part of <C, G>. In h and ddh both layouts are written.
template <class Op, bool Gated>
Vec hidden_cotangents(int64_t rows, int64_t hp, const float* z, const float* u, const float* dh, const float* r,
                      const Operand<Op>& g, const Operand<Op>& h, const Operand<Op>& ddh) {
  int64_t wide = Gated ? 2 * hp : hp;
  Vec total = zero();
  for (int64_t t = 0; t < rows; t += 2) {
    for (int64_t c = 0; c < hp; c += LANES) {
      Vec g1[2], g2[2], y[2], out[2];
      for (int i = 0; i < 2; ++i) {
        int64_t wide_at = (t + i) * wide + c, at = (t + i) * hp + c;
        Vec z1 = load(z + wide_at), sg = sigmoid(z1), a = z1 * sg, slope = sg + a * (splat(1.0f) - sg);
        Vec u1 = load(u + wide_at), d = load(dh + at);
        g1[i] = d * slope;
        y[i] = a;
        out[i] = u1 * slope;
        if (Gated) {
          Vec z2 = load(z + wide_at + hp), u2 = load(u + wide_at + hp);
          g1[i] = g1[i] * z2;
          g2[i] = d * a;
          y[i] = a * z2;
          out[i] = out[i] * z2 + u2 * a;
          total = total + u2 * g2[i];
        }
        total = total + u1 * g1[i] + load(r + at) * y[i];
      }
      g.template put<true, false>(t, c, g1[0], g1[1]);
      if (Gated) g.template put<true, false>(t, hp + c, g2[0], g2[1]);
      h.template put<true, true>(t, c, y[0], y[1]);
      ddh.template put<true, true>(t, c, out[0], out[1]);
    }
  }
  return total;
}

template <class Op, bool Gated>
void input_cotangents(int64_t rows, int64_t hp, const float* z, const float* u, const float* dh, const float* r,
                      const Operand<Op>& dz) {
  int64_t wide = Gated ? 2 * hp : hp;
  for (int64_t t = 0; t < rows; t += 2) {
    for (int64_t c = 0; c < hp; c += LANES) {
      Vec dz1[2], dz2[2];
      for (int i = 0; i < 2; ++i) {
        int64_t wide_at = (t + i) * wide + c, at = (t + i) * hp + c;
        Vec one = splat(1.0f), z1 = load(z + wide_at), sg = sigmoid(z1), a = z1 * sg, slope = sg + a * (one - sg);
        Vec bend = sg * (one - sg) * (splat(2.0f) + z1 * (one - sg - sg));
        Vec u1 = load(u + wide_at), d = load(dh + at), res = load(r + at);
        if (Gated) {
          Vec z2 = load(z + wide_at + hp), u2 = load(u + wide_at + hp);
          dz1[i] = u1 * d * z2 * bend + (u2 * d + res * z2) * slope;
          dz2[i] = u1 * d * slope + res * a;
        } else {
          dz1[i] = u1 * d * bend + res * slope;
        }
      }
      dz.template put<true, true>(t, c, dz1[0], dz1[1]);
      if (Gated) dz.template put<true, true>(t, hp + c, dz2[0], dz2[1]);
    }
  }
}

template <class Op>
struct SecondOrder : Block<Op> {
  using Block<Op>::s, Block<Op>::x, Block<Op>::e, Block<Op>::z, Block<Op>::dh, Block<Op>::y, Block<Op>::g, Block<Op>::h;
  float *u, *r, *de;  // [BLOCK, wide], [BLOCK, hp], [BLOCK, vp]
  Op* de_t;
  Operand<Op> ddh, dz;

  SecondOrder(const Call& c, Arena& arena) : Block<Op>(c, arena) {
    u = arena.take<float>(BLOCK * s.wide);
    r = arena.take<float>(BLOCK * s.hp);
    de = arena.take<float>(BLOCK * s.vp);
    de_t = arena.take<Op>(BLOCK * s.vp);
    ddh = this->operand(arena, s.hp);
    dz = this->operand(arena, s.wide);
  }

  // From x and e (the value): y = dx, de = dvalue (both without the rate), `sums` grows by the weights' gradients.
  // Returns this block's part of <C, G>.
  float backward(int64_t rows, const Weights<Op>& w, const Weights<Op>& cotangent, bool mse, Sums sums) {
    if (mse) this->residual(rows, w);
    else this->input_layer(rows, w);
    const Op* x_op = round_into(x, rows * s.dp, this->x_op);
    const Op* e_op = round_into(e, rows * s.vp, this->e_op);
    gemm(rows, s.wide, s.dp, x_op, s.dp, cotangent.in, s.wide, u, s.wide);
    gemm(rows, s.hp, s.vp, e_op, s.vp, w.out_t, s.hp, dh, s.hp);
    gemm(rows, s.hp, s.vp, e_op, s.vp, cotangent.out_t, s.hp, r, s.hp);
    Vec total = this->gated ? hidden_cotangents<Op, true>(rows, s.hp, z, u, dh, r, g, h, ddh)
                            : hidden_cotangents<Op, false>(rows, s.hp, z, u, dh, r, g, h, ddh);
    gemm(rows, s.vp, s.hp, h.plain, s.hp, cotangent.out, s.vp, de, s.vp);
    gemm(rows, s.vp, s.hp, ddh.plain, s.hp, w.out, s.vp, de, s.vp, true);
    transpose_into(e, rows, s.vp, this->e_t);
    gemm(s.vp, s.hp, rows, this->e_t, rows, ddh.pairs, s.hp, sums.out_t, s.hp, true);
    if (mse) {
      // e is spent: its operand's memory takes de.
      const Op* de_op = round_into(de, rows * s.vp, this->e_op);
      gemm(rows, s.hp, s.vp, de_op, s.vp, w.out_t, s.hp, r, s.hp, true);
      transpose_into(de, rows, s.vp, de_t);
      gemm(s.vp, s.hp, rows, de_t, rows, h.pairs, s.hp, sums.out_t, s.hp, true);
      for (int64_t i = 0; i < rows * s.vp; i += LANES) store(de + i, zero() - load(de + i));
    }
    if (this->gated) input_cotangents<Op, true>(rows, s.hp, z, u, dh, r, dz);
    else input_cotangents<Op, false>(rows, s.hp, z, u, dh, r, dz);
    transpose_into(x, rows, s.dp, this->x_t);
    gemm(s.dp, s.wide, rows, this->x_t, rows, dz.pairs, s.wide, sums.in, s.wide, true);
    gemm(rows, s.dp, s.wide, g.plain, s.wide, cotangent.in_t, s.dp, y, s.dp);
    gemm(rows, s.dp, s.wide, dz.plain, s.wide, w.in_t, s.dp, y, s.dp, true);
    return _mm512_reduce_add_ps(total);
  }
};

}  // namespace t5fx
