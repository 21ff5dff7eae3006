// Key norm's statistics: mean and sum of squared deviations of each channel over a chunk of tokens.
//
// A block's mean comes first and its deviations second, and blocks are joined by the update of Chan, Golub and LeVeque
// (1983): nothing large is ever subtracted from something large, whatever the mean of the keys.
#pragma once

#include "load.h"

namespace t5fx {

// Joins (mean, squares) of `more` tokens to those of `n`; [padded] each.
inline void join_stats(float* mean, float* squares, int64_t n, const float* mean_more, const float* squares_more,
                       int64_t more, int64_t padded) {
  if (more == 0) return;
  float share = float(double(more) / double(n + more)), weight = float(double(n) * double(more) / double(n + more));
  for (int64_t c = 0; c < padded; c += LANES) {
    Vec delta = load(mean_more + c) - load(mean + c);
    store(mean + c, load(mean + c) + delta * splat(share));
    store(squares + c, load(squares + c) + load(squares_more + c) + delta * delta * splat(weight));
  }
}

// stats [2, padded] of tokens [begin, end); scratch [2, padded].
template <class IO>
void chunk_stats(const Tokens<IO>& in, int64_t begin, int64_t end, float* stats, float* scratch) {
  std::memset(stats, 0, 2 * in.padded * sizeof(float));
  int64_t seen = 0;
  for (int64_t from = begin; from < end; from += BLOCK) {
    int64_t to = std::min(end, from + BLOCK), count = kept_tokens(in.keep, from, to);
    if (count == 0) continue;
    for (int64_t c = 0; c < in.padded; c += LANES) {
      Mask m = lanes(in.channels, c);
      Vec sum = zero(), squares = zero();
      for (int64_t n = from; n < to; ++n) {
        if (in.kept(n)) sum = sum + load(in.data + n * in.stride + c, m);
      }
      Vec mean = sum * splat(1.0f / float(count));
      for (int64_t n = from; n < to; ++n) {
        if (!in.kept(n)) continue;
        Vec deviation = load(in.data + n * in.stride + c, m) - mean;
        squares = squares + deviation * deviation;
      }
      store(scratch + c, mean);
      store(scratch + in.padded + c, squares);
    }
    join_stats(stats, stats + in.padded, seen, scratch, scratch + in.padded, count, in.padded);
    seen += count;
  }
}

}  // namespace t5fx
