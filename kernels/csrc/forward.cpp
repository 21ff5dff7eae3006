// Forward: key statistics, the inner step's sums, the fast weights, and the inner model on the queries.
#include "entry.h"
#include "inner.h"
#include "stats.h"

namespace t5fx {
namespace {

template <class IO, class Op>
struct Forward {
  const Call& c;
  Sizes s;
  int64_t rows;  // batch x heads
  Chunks keys, queries;
  float *chunk_stats_, *chunk_sums;  // [rows, chunks, 2, dp], [rows, chunks, weights]
  Op *slow, *fast;                   // operands: [heads, ...], [rows, ...]
  int64_t workspace;

  explicit Forward(const Call& c)
      : c(c), s(c), rows(c.batch * c.heads), keys(c.tokens, rows, 1024), queries(c.queries, rows, 256) {
    Arena arena(c.workspace);
    chunk_stats_ = arena.take<float>(rows * keys.count * 2 * s.dp);
    chunk_sums = arena.take<float>(rows * keys.count * s.weights());
    slow = arena.take<Op>(c.heads * Weights<Op>::size(s));
    fast = arena.take<Op>(rows * Weights<Op>::size(s));
    workspace = arena.used(c.workspace);
  }

  struct Scratch : Block<Op> {
    float *taps, *other;
    Scratch(const Call& c, Arena& arena) : Block<Op>(c, arena) {
      taps = arena.take<float>(std::max(taps_size(c.conv_query, this->s.dp), taps_size(c.conv_key, this->s.dp)));
      other = arena.take<float>(2 * this->s.dp);
    }
  };

  Scratch scratch() const {
    Arena measure(nullptr);
    Scratch{c, measure};
    Arena arena(thread_scratch(measure.used(nullptr)));
    return Scratch{c, arena};
  }

  const bool* keep(int64_t row) const { return c.mask ? c.mask + row / c.heads * c.tokens : nullptr; }
  Tokens<IO> tokens(const View& view, int64_t row, int64_t channels, const bool* keep) const {
    return Tokens<IO>(view, row / c.heads, row % c.heads, channels, keep);
  }
  const float* stats(int64_t row) const { return c.normed ? c.stats + row * 2 * s.d : nullptr; }
  Weights<Op> weights(Op* operands, int64_t i) const { return {operands + i * Weights<Op>::size(s), s}; }

  void run() {
    if (c.normed) {
      items(rows * keys.count, [&](int64_t i) { measure(i / keys.count, i % keys.count); });
      items(rows, [&](int64_t row) { join(row); });
    }
    items(c.heads, [&](int64_t head) { pack(head); });
    items(rows * keys.count, [&](int64_t i) { step(i / keys.count, i % keys.count); });
    items(rows, [&](int64_t row) { descend(row); });
    items(rows * queries.count, [&](int64_t i) { apply(i / queries.count, i % queries.count); });
  }

  template <class F>
  void items(int64_t count, const F& f) const {
    for_items(count, PAIRED<Op>, f);
  }

  float* stats_of_chunk(int64_t row, int64_t chunk) { return chunk_stats_ + (row * keys.count + chunk) * 2 * s.dp; }
  float* sums_of_chunk(int64_t row, int64_t chunk) { return chunk_sums + (row * keys.count + chunk) * s.weights(); }

  void measure(int64_t row, int64_t chunk) {
    Tokens<IO> key = tokens(c.key, row, s.d, keep(row));
    chunk_stats(key, keys.begin(chunk), keys.end(chunk), stats_of_chunk(row, chunk), scratch().other);
  }

  void join(int64_t row) {
    float* all = stats_of_chunk(row, 0);
    int64_t n = kept_tokens(keep(row), keys.begin(0), keys.end(0));
    for (int64_t i = 1; i < keys.count; ++i) {
      int64_t more = kept_tokens(keep(row), keys.begin(i), keys.end(i));
      const float* one = stats_of_chunk(row, i);
      join_stats(all, all + s.dp, n, one, one + s.dp, more, s.dp);
      n += more;
    }
    float* out = c.stats + row * 2 * s.d;
    for (int64_t i = 0; i < s.d; ++i) {
      out[i] = all[i];
      out[s.d + i] = float(1.0 / std::sqrt(double(all[s.dp + i]) / double(std::max<int64_t>(1, n)) + c.eps));
    }
  }

  void pack(int64_t head) {
    const float* layers[3] = {};
    for (int64_t i = 0; i < s.layers(); ++i) layers[i] = c.weights[i] + head * layer_size(i);
    Weights<Op> w = weights(slow, head);
    w.clear(s);
    w.pack(s, layers);
  }

  int64_t layer_size(int64_t i) const { return s.hidden * (i + 1 < s.layers() ? s.d : s.v); }

  void step(int64_t row, int64_t chunk) {
    Scratch block = scratch();
    Tokens<IO> key = tokens(c.key, row, s.d, keep(row)), value = tokens(c.value, row, s.v, keep(row));
    Taps taps = prepare_taps(c, c.conv_key, row % c.heads, s.d, stats(row), block.taps);
    Weights<Op> w = weights(slow, row % c.heads);
    float* sums = sums_of_chunk(row, chunk);
    std::memset(sums, 0, s.weights() * sizeof(float));
    for (int64_t from = keys.begin(chunk), end = keys.end(chunk); from < end; from += BLOCK) {
      int64_t count = std::min(BLOCK, end - from), padded = round_up(count, LANES);
      load_block(key, taps, from, count, block.x);
      clear_rows(block.x, s.dp, key.keep, from, count, padded);
      copy_block(value, from, count, padded, block.e);
      block.step(padded, w, c.mse, Sums(sums, s));
    }
  }

  // fast = weight - rate / n * sums. For dot the residual is -value, and everything is linear in it: the sign is here.
  void descend(int64_t row) {
    float* all = sums_of_chunk(row, 0);
    for (int64_t i = 1; i < keys.count; ++i) {
      const float* one = sums_of_chunk(row, i);
      for (int64_t j = 0; j < s.weights(); j += LANES) store(all + j, load(all + j) + load(one + j));
    }
    Sums sums(all, s);
    int64_t head = row % c.heads, last = s.layers() - 1;
    int64_t n = std::max<int64_t>(1, kept_tokens(keep(row), 0, c.tokens));
    float rate = c.rate[head] / float(n) * (c.mse ? -1.0f : 1.0f);
    const float* layers[3] = {};
    for (int64_t i = 0; i <= last; ++i) {
      const float* old = c.weights[i] + head * layer_size(i);
      float* now = c.fast[i] + row * layer_size(i);
      layers[i] = now;
      int64_t height = i < last ? s.d : s.hidden, width = i < last ? s.hidden : s.v;
      for (int64_t y = 0; y < height; ++y) {
        for (int64_t x = 0; x < width; ++x) {
          float sum = i < last ? sums.in[y * s.wide + i * s.hp + x] : sums.out_t[x * s.hp + y];
          now[y * width + x] = old[y * width + x] + rate * sum;
        }
      }
    }
    Weights<Op> w = weights(fast, row);
    w.clear(s);
    w.pack(s, layers);
  }

  void apply(int64_t row, int64_t chunk) {
    Scratch block = scratch();
    Tokens<IO> query = tokens(c.query, row, s.d, c.mask_query && c.conv_query.weight ? keep(row) : nullptr);
    Tokens<IO> output = tokens(c.output, row, s.v, nullptr);
    Taps taps = prepare_taps(c, c.conv_query, row % c.heads, s.d, nullptr, block.taps);
    Weights<Op> w = weights(fast, row);
    for (int64_t from = queries.begin(chunk), end = queries.end(chunk); from < end; from += BLOCK) {
      int64_t count = std::min(BLOCK, end - from), padded = round_up(count, LANES);
      load_block(query, taps, from, count, block.x);
      clear_rows(block.x, s.dp, nullptr, from, count, padded);
      block.apply(padded, w);
      store_block(block.y, s.vp, s.v, count, const_cast<IO*>(output.data) + from * output.stride, output.stride);
    }
  }
};

}  // namespace

int64_t forward(const Call& c, bool run) {
  return with_types(c, [&](auto io, auto op) {
    Forward<decltype(io), decltype(op)> forward(c);
    if (run) forward.run();
    return forward.workspace;
  });
}

}  // namespace t5fx

extern "C" int64_t t5fx_forward(const t5fx::Call* call, int run, char* error, int64_t size) {
  return t5fx::guarded(error, size, [&] { return t5fx::forward(*call, run); });
}
