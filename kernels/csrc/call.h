// One call as Python hands it over (kernels/cpu.py mirrors this struct field by field), and the sizes that follow.
#pragma once

#include <algorithm>
#include <cstdint>

namespace t5fx {

// Every scratch row is a whole number of 16-float vectors, its tail zero: no inner loop has a remainder.
constexpr int64_t LANES = 16;
// Tokens whose activations are in flight at once: with 64 channels about a quarter of a 1 MiB L2 cache.
constexpr int64_t BLOCK = 64;
constexpr int64_t MAX_AXES = 3;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t divide_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// [B, H, N, channels] with adjacent channels; strides in elements.
struct View {
  void* data;
  int64_t batch, head, token;
};

// weight [H * D, sides...] and bias [H * D] (or null), float32. weight is null where there is no convolution.
struct Convolution {
  const float *weight, *bias;
  int64_t side[MAX_AXES];
  float *weight_grad, *bias_grad;
};

struct Call {
  int64_t dtype, gated, mse, normed, mask_query, threads;
  int64_t batch, heads, queries, tokens, head_dim, value_dim, hidden;
  int64_t prefix, grid[MAX_AXES];
  double eps;
  View query, key, value, output;  // backward: output is its cotangent
  Convolution conv_query, conv_key;
  const bool* mask;         // [B, N] or null
  float* weights[3];        // each [H, ...]; read only
  const float* rate;        // [H]
  float* stats;             // [B, H, 2, D]
  float* fast[3];           // each [B, H, ...]
  void* workspace;
  // Backward only.
  View query_grad, key_grad, value_grad;
  float* weights_grad[3];
  float* rate_grad;
};

// Sizes of one head's problem. `wide` is the width of the input layer: swiglu's w1 and w2 side by side, or mlp's w1.
struct Sizes {
  int64_t d, v, hidden;      // as given
  int64_t dp, vp, hp, wide;  // rounded up to LANES
  explicit Sizes(const Call& c)
      : d(c.head_dim), v(c.value_dim), hidden(c.hidden), dp(round_up(d, LANES)), vp(round_up(v, LANES)),
        hp(round_up(hidden, LANES)), wide((c.gated ? 2 : 1) * hp) {}
  int64_t layers() const { return wide / hp + 1; }
  int64_t weights() const { return dp * wide + vp * hp; }
};

// How the tokens are cut into items of work. It depends on shapes alone, so that sums over tokens are formed in the
// same order, and give the same bits, on any number of threads.
struct Chunks {
  int64_t tokens, size, count;
  Chunks(int64_t tokens, int64_t rows, int64_t smallest) : tokens(tokens) {
    constexpr int64_t ENOUGH_ITEMS = 256;
    int64_t wanted = std::max<int64_t>(1, divide_up(ENOUGH_ITEMS, rows));
    size = std::max(smallest, round_up(divide_up(tokens, wanted), BLOCK));
    count = divide_up(tokens, size);
  }
  int64_t begin(int64_t i) const { return i * size; }
  int64_t end(int64_t i) const { return std::min(tokens, (i + 1) * size); }
};

}  // namespace t5fx
