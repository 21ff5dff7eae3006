// Loads a block of tokens: key norm and depthwise convolution on the way in, so that neither ever lies in memory.
//
// The convolution slides along the grid's last axis with its taps in registers, once for every row of taps. Key norm's
// mean is taken off each token as it is read, before the zero padding; its 1/deviation is folded into the taps, and
// the token itself (x + DWC(x)) into the middle one.
#pragma once

#include <cstring>

#include "gemm.h"

namespace t5fx {

// The tokens of one (batch row, head). `keep` [N], or null, is the mask: tokens outside of it read as zeros.
template <class IO>
struct Tokens {
  IO* data;
  int64_t stride, channels, padded;
  const bool* keep;

  Tokens(const View& view, int64_t batch, int64_t head, int64_t channels, const bool* keep)
      : data(static_cast<IO*>(view.data) + batch * view.batch + head * view.head), stride(view.token),
        channels(channels), padded(round_up(channels, LANES)), keep(keep) {}
  bool kept(int64_t n) const { return !keep || keep[n]; }
};

// One head's convolution, ready to run. Without one, `taps` is null and tokens are only normalised.
struct Taps {
  int64_t begin = 0, end = 0;  // the grid's tokens
  int64_t grid[MAX_AXES], side[MAX_AXES];
  const float *mean, *scale;  // [padded]
  const float *taps = nullptr, *bias = nullptr;  // [taps, padded], [padded]
  int64_t count() const { return side[0] * side[1] * side[2]; }
};

inline int64_t taps_of(const Convolution& conv) { return conv.side[0] * conv.side[1] * conv.side[2]; }

// Tokens that take part.
inline int64_t kept_tokens(const bool* keep, int64_t begin, int64_t end) {
  return keep ? std::count(keep + begin, keep + end, true) : end - begin;
}

// Floats that prepare_taps writes.
inline int64_t taps_size(const Convolution& conv, int64_t padded) {
  return (3 + (conv.weight ? taps_of(conv) : 0)) * padded;
}

// stats: [2, channels] (mean, 1/deviation), or null for none. `flipped`: the transposed convolution, that carries
// gradients from outputs to inputs: no bias, no norm.
inline Taps prepare_taps(const Call& c, const Convolution& conv, int64_t head, int64_t channels, const float* stats,
                         float* memory, bool flipped = false) {
  int64_t padded = round_up(channels, LANES);
  std::memset(memory, 0, taps_size(conv, padded) * sizeof(float));
  Taps t;
  float *mean = memory, *scale = memory + padded, *bias = memory + 2 * padded, *taps = memory + 3 * padded;
  t.mean = mean;
  t.scale = scale;
  for (int64_t i = 0; i < channels; ++i) {
    mean[i] = stats ? stats[i] : 0.0f;
    scale[i] = stats ? stats[channels + i] : 1.0f;
  }
  if (!conv.weight) return t;
  t.taps = taps;
  t.bias = bias;
  t.begin = c.prefix;
  t.end = c.prefix + c.grid[0] * c.grid[1] * c.grid[2];
  std::copy(c.grid, c.grid + MAX_AXES, t.grid);
  std::copy(conv.side, conv.side + MAX_AXES, t.side);
  int64_t count = taps_of(conv);
  for (int64_t i = 0; i < channels; ++i) {
    const float* weight = conv.weight + (head * channels + i) * count;
    for (int64_t tap = 0; tap < count; ++tap) {
      float w = weight[flipped ? count - 1 - tap : tap] + (tap == count / 2 ? 1.0f : 0.0f);
      taps[tap * padded + i] = w * scale[i];
    }
    if (conv.bias && !flipped) bias[i] = conv.bias[head * channels + i];
  }
  return t;
}

// How far after its own token a convolution's output reaches.
inline int64_t reach(const Taps& t) {
  if (!t.taps) return 0;
  return (t.side[0] / 2 * t.grid[1] + t.side[1] / 2) * t.grid[2] + t.side[2] / 2;
}

// Asks for tokens [from, from + BLOCK) ahead of their use: in a packed projection a head's rows lie kilobytes apart,
// which no hardware prefetcher follows. With `Write`, for storing. (Inlined by force: GCC takes a function that only
// prefetches for one without an effect, and drops its calls.)
template <bool Write = false, class IO>
[[gnu::always_inline]] inline void prefetch(const Tokens<IO>& in, int64_t from, int64_t end) {
  for (int64_t n = from, to = std::min(end, from + BLOCK); n < to; ++n) {
    const char* row = reinterpret_cast<const char*>(in.data + n * in.stride);
    for (int64_t at = 0; at < in.channels * int64_t(sizeof(IO)); at += 64) __builtin_prefetch(row + at, Write, 2);
  }
}

// Calls f(token, count, coordinates of the first) for each stretch of [from, to) that lies in one row of the grid.
template <class F>
void for_stretches(const Taps& t, int64_t from, int64_t to, const F& f) {
  from = std::max(from, t.begin);
  to = std::min(to, t.end);
  for (int64_t n = from; n < to;) {
    int64_t cell = n - t.begin, x = cell % t.grid[2], row = cell / t.grid[2];
    int64_t count = std::min(to - n, t.grid[2] - x);
    int64_t at[MAX_AXES] = {row / t.grid[1], row % t.grid[1], x};
    f(n, count, at);
    n += count;
  }
}

// Calls f(first token of the grid row, first tap) for each row of taps that falls inside the grid around `at`.
template <class F>
void for_tap_rows(const Taps& t, const int64_t* at, const F& f) {
  for (int64_t i = 0; i < t.side[0]; ++i) {
    int64_t z = at[0] + i - t.side[0] / 2;
    if (z < 0 || z >= t.grid[0]) continue;
    for (int64_t j = 0; j < t.side[1]; ++j) {
      int64_t y = at[1] + j - t.side[1] / 2;
      if (y < 0 || y >= t.grid[1]) continue;
      f(t.begin + (z * t.grid[1] + y) * t.grid[2], (i * t.side[1] + j) * t.side[2]);
    }
  }
}

// Calls f<width>(tap, shift): the taps of a row in windows that fit into registers.
template <class F>
void for_windows(int64_t side, const F& f) {
  if (side == 3) {
    f(std::integral_constant<int, 3>(), 0, -1);
  } else if (side == 5) {
    f(std::integral_constant<int, 5>(), 0, -2);
  } else {
    for (int64_t tap = 0; tap < side; ++tap) f(std::integral_constant<int, 1>(), tap, tap - side / 2);
  }
}

// Sixteen channels of the token in column x of a grid row, the mean taken off; zero outside of the row and the mask.
template <class IO>
Vec fetch(const Tokens<IO>& in, int64_t row, int64_t width, int64_t x, int64_t c, Mask m, Vec mean) {
  if (x < 0 || x >= width || !in.kept(row + x)) return zero();
  return load(in.data + (row + x) * in.stride + c, m) - mean;
}

// out[n] += sum over W neighbouring taps, for a stretch of `count` tokens from column x.
template <int W, class IO>
void slide(const Tokens<IO>& in, int64_t row, int64_t width, int64_t x, int64_t count, int64_t c, Mask m, Vec mean,
           const float* taps, float* out) {
  Vec weight[W], window[W];
  for (int j = 0; j < W; ++j) weight[j] = load(taps + j * in.padded + c);
  for (int j = 0; j + 1 < W; ++j) window[j] = fetch(in, row, width, x + j, c, m, mean);
  for (int64_t n = 0; n < count; ++n) {
    window[W - 1] = fetch(in, row, width, x + n + W - 1, c, m, mean);
    Vec sum = load(out + n * in.padded + c);
    for (int j = 0; j < W; ++j) sum = sum + weight[j] * window[j];
    store(out + n * in.padded + c, sum);
    for (int j = 0; j + 1 < W; ++j) window[j] = window[j + 1];
  }
}

// Tokens [from, from + count) -> out [count, padded]. Masked ones count as zeros; what the convolution puts in their
// place stays (clear_rows takes it away where they don't take part).
template <class IO>
void load_block(const Tokens<IO>& in, const Taps& t, int64_t from, int64_t count, float* out) {
  for (int64_t n = from; n < from + count; ++n) {
    bool inside = n >= t.begin && n < t.end;
    for (int64_t c = 0; c < in.padded; c += LANES) {
      Vec x = zero();
      if (inside) {
        x = load(t.bias + c);
      } else if (in.kept(n)) {
        x = (load(in.data + n * in.stride + c, lanes(in.channels, c)) - load(t.mean + c)) * load(t.scale + c);
      }
      store(out + (n - from) * in.padded + c, x);
    }
  }
  for_stretches(t, from, from + count, [&](int64_t n, int64_t length, const int64_t* at) {
    float* to = out + (n - from) * in.padded;
    for (int64_t c = 0; c < in.padded; c += LANES) {
      Mask m = lanes(in.channels, c);
      Vec mean = load(t.mean + c);
      for_tap_rows(t, at, [&](int64_t row, int64_t tap) {
        for_windows(t.side[2], [&](auto w, int64_t first, int64_t shift) {
          const float* taps = t.taps + (tap + first) * in.padded;
          slide<decltype(w)::value>(in, row, t.grid[2], at[2] + shift, length, c, m, mean, taps, to);
        });
      });
    }
  });
}

// Tokens [from, from + count) as they are, zeros where masked -> out [rows, padded], zeros from `count` on.
template <class IO>
void copy_block(const Tokens<IO>& in, int64_t from, int64_t count, int64_t rows, float* out) {
  for (int64_t n = 0; n < rows; ++n) {
    bool there = n < count && in.kept(from + n);
    for (int64_t c = 0; c < in.padded; c += LANES) {
      store(out + n * in.padded + c, there ? load(in.data + (from + n) * in.stride + c, lanes(in.channels, c)) : zero());
    }
  }
}

// Zeros for rows whose token takes no part, and for rows [count, rows).
inline void clear_rows(float* x, int64_t padded, const bool* keep, int64_t from, int64_t count, int64_t rows) {
  for (int64_t n = 0; n < rows; ++n) {
    if (n >= count || (keep && !keep[from + n])) std::memset(x + n * padded, 0, padded * sizeof(float));
  }
}

// x [count, padded], times `factor`, becomes tokens [from, from + count) of `out`.
template <class IO>
void store_block(const float* x, const Tokens<IO>& out, int64_t from, int64_t count, float factor = 1.0f) {
  for (int64_t n = 0; n < count; ++n) {
    IO* to = out.data + (from + n) * out.stride;
    for (int64_t c = 0; c < out.channels; c += LANES) {
      store(to + c, load(x + n * out.padded + c) * splat(factor), lanes(out.channels, c));
    }
  }
}

}  // namespace t5fx
