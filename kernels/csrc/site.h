// What forward and backward share: one call's sizes, its work items, and where each of them finds its data.
#pragma once

#include "inner.h"

namespace t5fx {

template <class IO, class Op>
struct Site {
  const Call& c;
  Sizes s;
  int64_t rows;  // batch x heads; a row is one of them
  Chunks keys, queries;

  explicit Site(const Call& c)
      : c(c), s(c), rows(c.batch * c.heads), keys(c.tokens, rows, 1024), queries(c.queries, rows, 256) {}

  int64_t head(int64_t row) const { return row % c.heads; }
  const bool* keep(int64_t row) const { return c.mask ? c.mask + row / c.heads * c.tokens : nullptr; }
  // The mask of the queries counts in their convolution only.
  const bool* keep_query(int64_t row) const { return c.mask_query && c.conv_query.weight ? keep(row) : nullptr; }
  // n of the step: a row without a token divides by one.
  int64_t tokens(int64_t row) const { return std::max<int64_t>(1, kept_tokens(keep(row), 0, c.tokens)); }
  const float* stats(int64_t row) const { return c.normed ? c.stats + row * 2 * s.d : nullptr; }

  Tokens<IO> view(const View& view, int64_t row, int64_t channels, const bool* keep = nullptr) const {
    return Tokens<IO>(view, row / c.heads, head(row), channels, keep);
  }
  Tokens<IO> query(int64_t row) const { return view(c.query, row, s.d, keep_query(row)); }
  Tokens<IO> key(int64_t row) const { return view(c.key, row, s.d, keep(row)); }
  Tokens<IO> value(int64_t row) const { return view(c.value, row, s.v, keep(row)); }

  // Weight i of one head, [height, width], and where its element lies in Sums.
  int64_t height(int64_t i) const { return i + 1 < s.layers() ? s.d : s.hidden; }
  int64_t width(int64_t i) const { return i + 1 < s.layers() ? s.hidden : s.v; }
  int64_t layer_size(int64_t i) const { return height(i) * width(i); }
  template <class F>
  void for_weights(int64_t i, Sums sums, const F& f) const {
    for (int64_t y = 0; y < height(i); ++y) {
      for (int64_t x = 0; x < width(i); ++x) {
        float& sum = i + 1 < s.layers() ? sums.in[y * s.wide + i * s.hp + x] : sums.out_t[x * s.hp + y];
        f(y * width(i) + x, sum);
      }
    }
  }

  // all[0] += all[1] + ... in this order: `count` pieces of `size` floats.
  static void add_up(float* all, int64_t count, int64_t size) {
    for (int64_t i = 1; i < count; ++i) {
      for (int64_t j = 0; j < size; j += LANES) store(all + j, load(all + j) + load(all + i * size + j));
    }
  }

  Weights<Op> weights(Op* operands, int64_t i) const { return {operands + i * Weights<Op>::size(s), s}; }
  // The weights [n, ...] at `sources`, number i of n, as operand number i.
  void pack(float* const* sources, int64_t i, Op* operands) const {
    const float* layers[3] = {};
    for (int64_t l = 0; l < s.layers(); ++l) layers[l] = sources[l] + i * layer_size(l);
    Weights<Op> w = weights(operands, i);
    w.clear(s);
    w.pack(s, layers);
  }

  template <class F>
  void for_rows(const F& f) const {
    for_items(rows, PAIRED<Op>, f);
  }
  template <class F>
  void for_chunks(const Chunks& chunks, const F& f) const {
    for_items(rows * chunks.count, PAIRED<Op>, [&](int64_t i) { f(i / chunks.count, i % chunks.count); });
  }
  // f(first token, count, count rounded up) for the blocks of a chunk.
  template <class F>
  static void for_blocks(const Chunks& chunks, int64_t chunk, const F& f) {
    for (int64_t from = chunks.begin(chunk), end = chunks.end(chunk); from < end; from += BLOCK) {
      int64_t count = std::min(BLOCK, end - from);
      f(from, count, round_up(count, LANES));
    }
  }

  // An item's scratch, made of this thread's memory: T(call, arena).
  template <class T>
  T scratch() const {
    Arena measure(nullptr);
    T(c, measure);
    Arena arena(thread_scratch(measure.used(nullptr)));
    return T(c, arena);
  }

  // The block's tokens as the inner model sees them.
  void load_queries(const Tokens<IO>& in, const Taps& taps, int64_t from, int64_t count, int64_t padded, float* x) const {
    load_block(in, taps, from, count, x);
    clear_rows(x, s.dp, nullptr, from, count, padded);
  }
  void load_keys(const Tokens<IO>& in, const Taps& taps, int64_t from, int64_t count, int64_t padded, float* x) const {
    load_block(in, taps, from, count, x);
    clear_rows(x, s.dp, in.keep, from, count, padded);
  }
};

inline int64_t taps_size(const Call& c) {
  int64_t padded = round_up(c.head_dim, LANES);
  return std::max(taps_size(c.conv_query, padded), taps_size(c.conv_key, padded));
}

}  // namespace t5fx
