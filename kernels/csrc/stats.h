// Key norm's statistics: mean and sum of squared deviations of each channel over a chunk of tokens.
//
// A block's mean comes first and its deviations second, and blocks are joined in float64 by the update of Chan, Golub
// and LeVeque (1983): nothing large is ever subtracted from something large, whatever the mean of the keys.
#pragma once

#include "load.h"

namespace t5fx {

// [padded] each.
struct Moments {
  double *mean, *squares;
  Moments(double* memory, int64_t padded) : mean(memory), squares(memory + padded) {}
};

// Joins those of `more` tokens to those of `n`.
inline void join_moments(Moments all, int64_t n, Moments one, int64_t more, int64_t padded) {
  if (more == 0) return;
  double share = double(more) / double(n + more), weight = double(n) * share;
  for (int64_t c = 0; c < padded; ++c) {
    double delta = one.mean[c] - all.mean[c];
    all.mean[c] += delta * share;
    all.squares[c] += one.squares[c] + delta * delta * weight;
  }
}

inline void store_double(double* p, Vec x) {
  _mm512_storeu_pd(p, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
  _mm512_storeu_pd(p + 8, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
}

// Of tokens [begin, end); `one` is scratch.
template <class IO>
void chunk_moments(const Tokens<IO>& in, int64_t begin, int64_t end, Moments all, Moments one) {
  std::fill_n(all.mean, 2 * in.padded, 0.0);
  int64_t seen = 0;
  for (int64_t from = begin; from < end; from += BLOCK) {
    int64_t to = std::min(end, from + BLOCK), count = kept_tokens(in.keep, from, to);
    if (count == 0) continue;
    prefetch(in, to, end);
    for (int64_t c = 0; c < in.padded; c += LANES) {
      Mask m = lanes(in.channels, c);
      Vec sum = zero(), off = zero(), squares = zero(), share = splat(1.0f / float(count));
      for (int64_t n = from; n < to; ++n) {
        if (in.kept(n)) sum = sum + load(in.data + n * in.stride + c, m);
      }
      Vec mean = sum * share;
      for (int64_t n = from; n < to; ++n) {
        if (!in.kept(n)) continue;
        Vec deviation = load(in.data + n * in.stride + c, m) - mean;
        off = off + deviation;
        squares = squares + deviation * deviation;
      }
      store_double(one.mean + c, mean);
      store_double(one.squares + c, squares - off * off * share);
      alignas(64) float rest[LANES];  // of the mean, lost to rounding
      store(rest, off * share);
      for (int64_t i = 0; i < LANES; ++i) one.mean[c + i] += rest[i];
    }
    join_moments(all, seen, one, count, in.padded);
    seen += count;
  }
}

}  // namespace t5fx
