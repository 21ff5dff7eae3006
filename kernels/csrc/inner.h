// The inner models on one block of tokens: forward, and the gradient of their weights.
//
//     swiglu  f(x) = (silu(x w1) * (x w2)) w3        mlp  f(x) = silu(x w1) w2
//
// `in` is w1 (or w1 and w2 side by side), `out` the last weight. With e the residual at the output, dh = e out^T and
// z = x in, the gradients are  in: x^T [dh z2 silu'(z1), dh silu(z1)]  and  out: h^T e. The latter is kept transposed,
// e^T h, so that what the activations make is always the right-hand operand, written in that layout at once.
#pragma once

#include "load.h"

namespace t5fx {

// One head's weights as operands.
template <class Op>
struct Weights {
  Op* in;      // [dp, wide]
  Op* out;     // [hp, vp]
  Op* in_t;    // [wide, dp]
  Op* out_t;   // [vp, hp]
  static int64_t size(const Sizes& s) { return 2 * s.weights(); }

  Weights(Op* memory, const Sizes& s)
      : in(memory), out(in + s.dp * s.wide), in_t(out + s.hp * s.vp), out_t(in_t + s.wide * s.dp) {}

  void clear(const Sizes& s) { std::memset(static_cast<void*>(in), 0, size(s) * sizeof(Op)); }
  // layer[i]: a float32 matrix, [d, hidden] for all but the last, which is [hidden, v].
  void pack(const Sizes& s, const float* const* layer) {
    int64_t last = s.layers() - 1;
    for (int64_t i = 0; i < last; ++i) {
      pack_matrix(in, s.wide, 0, i * s.hp, layer[i], s.hidden, 1, s.d, s.hidden);
      pack_matrix(in_t, s.dp, i * s.hp, 0, layer[i], 1, s.hidden, s.hidden, s.d);
    }
    pack_matrix(out, s.vp, 0, 0, layer[last], s.v, 1, s.hidden, s.v);
    pack_matrix(out_t, s.hp, 0, 0, layer[last], 1, s.v, s.v, s.hidden);
  }
};

// A sum over tokens of the weights' gradients, float32: in [dp, wide], then out^T [vp, hp].
struct Sums {
  float *in, *out_t;
  Sums(float* memory, const Sizes& s) : in(memory), out_t(memory + s.dp * s.wide) {}
};

// h = f's hidden layer. z [rows, wide].
template <class Op, bool Gated, bool Plain, bool Pairs>
void activate(int64_t rows, int64_t hp, const float* z, const Operand<Op>& h) {
  int64_t wide = Gated ? 2 * hp : hp;
  for (int64_t t = 0; t < rows; t += 2) {
    for (int64_t c = 0; c < hp; c += LANES) {
      Vec y[2];
      for (int r = 0; r < 2; ++r) {
        const float* at = z + (t + r) * wide + c;
        y[r] = load(at) * sigmoid(load(at));
        if (Gated) y[r] = y[r] * load(at + hp);
      }
      h.template put<Plain, Pairs>(t, c, y[0], y[1]);
    }
  }
}

// g = the gradient at z, from dh [rows, hp]; and h, as a right-hand operand, on the way.
template <class Op, bool Gated, bool Plain>
void slopes(int64_t rows, int64_t hp, const float* z, const float* dh, const Operand<Op>& g, const Operand<Op>& h) {
  int64_t wide = Gated ? 2 * hp : hp;
  for (int64_t t = 0; t < rows; t += 2) {
    for (int64_t c = 0; c < hp; c += LANES) {
      Vec g1[2], g2[2], y[2];
      for (int r = 0; r < 2; ++r) {
        const float* at = z + (t + r) * wide + c;
        Vec z1 = load(at), s = sigmoid(z1), a = z1 * s, slope = s + a * (splat(1.0f) - s);
        Vec d = load(dh + (t + r) * hp + c);
        g1[r] = d * slope;
        y[r] = a;
        if (Gated) {
          Vec z2 = load(at + hp);
          g1[r] = g1[r] * z2;
          g2[r] = d * a;
          y[r] = a * z2;
        }
      }
      g.template put<Plain, true>(t, c, g1[0], g1[1]);
      if (Gated) g.template put<Plain, true>(t, hp + c, g2[0], g2[1]);
      h.template put<false, true>(t, c, y[0], y[1]);
    }
  }
}

// The scratch of one block, and what runs in it. `rows` is the block's tokens rounded up to LANES.
template <class Op>
struct Block {
  Sizes s;
  bool gated;
  float *x, *e, *z, *dh, *y;  // [BLOCK, dp], [BLOCK, vp], [BLOCK, wide], [BLOCK, hp], [BLOCK, max(vp, dp)]
  Op *x_op, *x_t, *e_op, *e_t;
  Operand<Op> g, h;

  Block(const Call& c, Arena& arena) : s(c), gated(c.gated) {
    x = arena.take<float>(BLOCK * s.dp);
    e = arena.take<float>(BLOCK * s.vp);
    z = arena.take<float>(BLOCK * s.wide);
    dh = arena.take<float>(BLOCK * s.hp);
    y = arena.take<float>(BLOCK * std::max(s.vp, s.dp));
    x_op = arena.take<Op>(BLOCK * s.dp);
    x_t = arena.take<Op>(BLOCK * s.dp);
    e_op = arena.take<Op>(BLOCK * s.vp);
    e_t = arena.take<Op>(BLOCK * s.vp);
    g = operand(arena, s.wide);
    h = operand(arena, s.hp);
  }

  static Operand<Op> operand(Arena& arena, int64_t ld) {
    Operand<Op> o;
    o.plain = arena.take<Op>(BLOCK * ld);
    o.pairs = PAIRED<Op> ? arena.take<Op>(BLOCK * ld) : o.plain;
    o.ld = ld;
    return o;
  }

  // y [rows, vp] = f(x)
  void apply(int64_t rows, const Weights<Op>& w) {
    input_layer(rows, w);
    hidden<true, false>(rows);
    gemm(rows, s.vp, s.hp, h.plain, s.hp, w.out, s.vp, y, s.vp);
  }

  // z = x in. Keeps x as an operand for whoever comes next.
  void input_layer(int64_t rows, const Weights<Op>& w) {
    const Op* a = round_into(x, rows * s.dp, x_op);
    gemm(rows, s.wide, s.dp, a, s.dp, w.in, s.wide, z, s.wide);
  }

  template <bool Plain, bool Pairs>
  void hidden(int64_t rows) {
    if (gated) activate<Op, true, Plain, Pairs>(rows, s.hp, z, h);
    else activate<Op, false, Plain, Pairs>(rows, s.hp, z, h);
  }

  // e = f(x) - e: the residual of mse, in place of the value.
  void residual(int64_t rows, const Weights<Op>& w) {
    apply(rows, w);
    for (int64_t i = 0; i < rows * s.vp; i += LANES) store(e + i, load(y + i) - load(e + i));
  }

  // Adds this block's part of the weights' gradients to `sums`, from x and e. With `Plain`, g stays behind as a
  // left-hand operand, from which the gradient at x follows.
  template <bool Plain = false>
  void step(int64_t rows, const Weights<Op>& w, bool mse, Sums sums) {
    if (mse) residual(rows, w);
    else input_layer(rows, w);
    const Op* a = round_into(e, rows * s.vp, e_op);
    gemm(rows, s.hp, s.vp, a, s.vp, w.out_t, s.hp, dh, s.hp);
    if (gated) slopes<Op, true, Plain>(rows, s.hp, z, dh, g, h);
    else slopes<Op, false, Plain>(rows, s.hp, z, dh, g, h);
    transpose_into(x, rows, s.dp, x_t);
    transpose_into(e, rows, s.vp, e_t);
    gemm(s.dp, s.wide, rows, x_t, rows, g.pairs, s.wide, sums.in, s.wide, true);
    gemm(s.vp, s.hp, rows, e_t, rows, h.pairs, s.hp, sums.out_t, s.hp, true);
  }
};

}  // namespace t5fx
