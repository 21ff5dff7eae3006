// Sums over tokens that the gradients of a convolution, and of the key norm before it, are made of.
//
// With p the cotangent of the convolution's output and x its input before the norm's division (mean off, masked and
// padding zero), tap t gets  product_t = sum_n p[n] x[n + t]. Key norm's backward needs the sums over tokens of dkn and
// of dkn * kn, where dkn[m] = sum_t w_t p[m - t]. Both follow from sums by tap, before any dkn is known:
//
//     sum_m dkn[m] kn[m] = sum_t w_t / deviation * product_t        sum_m dkn[m] = sum_t w_t seen_t
//
// with seen_t the sum of p[n] over tokens n whose neighbour n + t is a token that takes part.
#pragma once

#include "load.h"

namespace t5fx {

// [padded] each: p over the grid's tokens (the bias' gradient), p and p * x over the others; then [taps, padded].
struct TapSums {
  float *inside, *outside, *outside_product, *product, *seen;
  TapSums(float* memory, int64_t padded, int64_t taps)
      : inside(memory), outside(inside + padded), outside_product(outside + padded), product(outside_product + padded),
        seen(product + taps * padded) {}
  static int64_t size(const Convolution& conv, int64_t padded) {
    return (3 + (conv.weight ? 2 * taps_of(conv) : 0)) * padded;
  }
};

inline void add_to(float* sum, Vec x) { store(sum, load(sum) + x); }

template <int W, class IO>
void slide_gradient(const Tokens<IO>& in, int64_t row, int64_t width, int64_t x, int64_t count, int64_t c, Mask m,
                    Vec mean, const float* p, float* product, float* seen) {
  Vec window[W], there[W], sum[W], sum_seen[W];
  auto presence = [&](int64_t at) { return at >= 0 && at < width && in.kept(row + at) ? splat(1.0f) : zero(); };
  for (int j = 0; j < W; ++j) sum[j] = sum_seen[j] = zero();
  for (int j = 0; j + 1 < W; ++j) {
    window[j] = fetch(in, row, width, x + j, c, m, mean);
    there[j] = presence(x + j);
  }
  for (int64_t n = 0; n < count; ++n) {
    window[W - 1] = fetch(in, row, width, x + n + W - 1, c, m, mean);
    there[W - 1] = presence(x + n + W - 1);
    Vec cotangent = load(p + n * in.padded + c);
    for (int j = 0; j < W; ++j) {
      sum[j] = sum[j] + cotangent * window[j];
      sum_seen[j] = sum_seen[j] + cotangent * there[j];
    }
    for (int j = 0; j + 1 < W; ++j) {
      window[j] = window[j + 1];
      there[j] = there[j + 1];
    }
  }
  for (int j = 0; j < W; ++j) {
    add_to(product + j * in.padded + c, sum[j]);
    add_to(seen + j * in.padded + c, sum_seen[j]);
  }
}

// p [count, padded]: the cotangent of load_block's result for tokens [from, from + count).
template <class IO>
void add_tap_sums(const Tokens<IO>& in, const Taps& t, int64_t from, int64_t count, const float* p, TapSums sums) {
  for (int64_t n = from; n < from + count; ++n) {
    bool inside = n >= t.begin && n < t.end;
    for (int64_t c = 0; c < in.padded; c += LANES) {
      Vec cotangent = load(p + (n - from) * in.padded + c);
      add_to((inside ? sums.inside : sums.outside) + c, cotangent);
      if (inside || !in.kept(n)) continue;
      Vec x = load(in.data + n * in.stride + c, lanes(in.channels, c)) - load(t.mean + c);
      add_to(sums.outside_product + c, cotangent * x);
    }
  }
  for_stretches(t, from, from + count, [&](int64_t n, int64_t length, const int64_t* at) {
    for (int64_t c = 0; c < in.padded; c += LANES) {
      Mask m = lanes(in.channels, c);
      Vec mean = load(t.mean + c);
      for_tap_rows(t, at, [&](int64_t row, int64_t tap) {
        for_windows(t.side[2], [&](auto w, int64_t first, int64_t shift) {
          int64_t to = (tap + first) * in.padded;
          slide_gradient<decltype(w)::value>(in, row, t.grid[2], at[2] + shift, length, c, m, mean,
                                             p + (n - from) * in.padded, sums.product + to, sums.seen + to);
        });
      });
    }
  });
}

}  // namespace t5fx
