// Forward: key statistics, the inner step's sums, the fast weights, and the inner model on the queries.
#include "entry.h"
#include "site.h"
#include "stats.h"

namespace t5fx {
namespace {

template <class Op>
struct Scratch : Block<Op> {
  float* taps;
  double* moments;
  Scratch(const Call& c, Arena& arena) : Block<Op>(c, arena) {
    taps = arena.take<float>(taps_size(c));
    moments = arena.take<double>(2 * this->s.dp);
  }
};

template <class IO, class Op>
struct Forward : Site<IO, Op> {
  using Base = Site<IO, Op>;
  using Base::c, Base::s, Base::rows, Base::keys, Base::queries;
  double* moments;  // [rows, chunks, 2, dp]
  float* sums;      // [rows, chunks, weights]
  Op *slow, *fast;  // operands of the weights: [heads, ...], [rows, ...]
  int64_t workspace;

  explicit Forward(const Call& c) : Base(c) {
    Arena arena(c.workspace);
    moments = arena.take<double>(rows * keys.count * 2 * s.dp);
    sums = arena.take<float>(rows * keys.count * s.weights());
    slow = arena.take<Op>(c.heads * Weights<Op>::size(s));
    fast = arena.take<Op>(rows * Weights<Op>::size(s));
    workspace = arena.used(c.workspace);
  }

  void run() {
    use_huge_pages(c.output.data, rows * c.queries * s.v * sizeof(IO));
    use_huge_pages(c.workspace, workspace);
    if (c.normed) {
      this->for_chunks(keys, [&](int64_t row, int64_t chunk) { measure(row, chunk); });
      this->for_rows([&](int64_t row) { join(row); });
    }
    for_items(c.heads, PAIRED<Op>, [&](int64_t head) { this->pack(c.weights, head, slow); });
    this->for_chunks(keys, [&](int64_t row, int64_t chunk) { step(row, chunk); });
    this->for_rows([&](int64_t row) { descend(row); });
    this->for_chunks(queries, [&](int64_t row, int64_t chunk) { apply(row, chunk); });
  }

  Moments moments_of(int64_t row, int64_t chunk) { return {moments + (row * keys.count + chunk) * 2 * s.dp, s.dp}; }
  float* sums_of(int64_t row, int64_t chunk) { return sums + (row * keys.count + chunk) * s.weights(); }

  void measure(int64_t row, int64_t chunk) {
    Moments spare(this->template scratch<Scratch<Op>>().moments, s.dp);
    chunk_moments(this->key(row), keys.begin(chunk), keys.end(chunk), moments_of(row, chunk), spare);
  }

  void join(int64_t row) {
    Moments all = moments_of(row, 0);
    int64_t seen = kept_tokens(this->keep(row), keys.begin(0), keys.end(0));
    for (int64_t i = 1; i < keys.count; ++i) {
      int64_t more = kept_tokens(this->keep(row), keys.begin(i), keys.end(i));
      join_moments(all, seen, moments_of(row, i), more, s.dp);
      seen += more;
    }
    float* out = c.stats + row * 2 * s.d;
    for (int64_t i = 0; i < s.d; ++i) {
      out[i] = float(all.mean[i]);
      out[s.d + i] = float(1.0 / std::sqrt(all.squares[i] / double(this->tokens(row)) + c.eps));
    }
  }

  void step(int64_t row, int64_t chunk) {
    auto block = this->template scratch<Scratch<Op>>();
    Tokens<IO> key = this->key(row), value = this->value(row);
    Taps taps = prepare_taps(c, c.conv_key, this->head(row), s.d, this->stats(row), block.taps);
    Weights<Op> w = this->weights(slow, this->head(row));
    std::memset(sums_of(row, chunk), 0, s.weights() * sizeof(float));
    this->for_blocks(keys, chunk, [&](int64_t from, int64_t count, int64_t padded) {
      this->load_keys(key, taps, from, count, padded, block.x);
      copy_block(value, from, count, padded, block.e);
      prefetch(key, from + BLOCK + reach(taps), c.tokens);
      prefetch(value, from + BLOCK, c.tokens);
      block.step(padded, w, c.mse, Sums(sums_of(row, chunk), s));
    });
  }

  // fast = weight - rate / n * sums. For dot the residual is -value, and everything is linear in it: the sign is here.
  void descend(int64_t row) {
    float rate = c.rate[this->head(row)] / float(this->tokens(row)) * (c.mse ? -1.0f : 1.0f);
    this->add_up(sums_of(row, 0), keys.count, s.weights());
    for (int64_t i = 0; i < s.layers(); ++i) {
      const float* old = c.weights[i] + this->head(row) * this->layer_size(i);
      float* now = c.fast[i] + row * this->layer_size(i);
      this->for_weights(i, Sums(sums_of(row, 0), s), [&](int64_t at, float sum) { now[at] = old[at] + rate * sum; });
    }
    this->pack(c.fast, row, fast);
  }

  void apply(int64_t row, int64_t chunk) {
    auto block = this->template scratch<Scratch<Op>>();
    Tokens<IO> query = this->query(row), output = this->view(c.output, row, s.v);
    Taps taps = prepare_taps(c, c.conv_query, this->head(row), s.d, nullptr, block.taps);
    Weights<Op> w = this->weights(fast, row);
    this->for_blocks(queries, chunk, [&](int64_t from, int64_t count, int64_t padded) {
      this->load_queries(query, taps, from, count, padded, block.x);
      prefetch(query, from + BLOCK + reach(taps), c.queries);
      prefetch<true>(output, from, c.queries);
      block.apply(padded, w);
      store_block(block.y, output, from, count);
    });
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

// Runs a call, or says how many bytes of workspace it needs; -1 is an error, told in `error`.
extern "C" int64_t t5fx_forward(const t5fx::Call* call, int run, char* error, int64_t size) {
  return t5fx::guarded(error, size, [&] { return t5fx::forward(*call, run); });
}
