// Backward. Activations are computed again, block by block; what lies in memory is the cotangents of the tokens as the
// inner model saw them, float32, where a convolution or the key norm still has to be undone. They are made and undone
// for a few rows at a time, enough to keep the threads busy: memory that is used again is in cache, and already mapped.
//
//     queries   cotangent of the normed, convolved queries, and of the fast weights
//     keys      through fast = weight - rate / n * G: cotangents of keys, values, weights, rate (second.h)
//     undo      transposed convolutions, key norm
//
// The cotangent of G is taken without the rate, which multiplies what comes of it: so nothing divides by a rate of 0.
#include "entry.h"
#include "second.h"
#include "site.h"
#include "tapgrad.h"

namespace t5fx {
namespace {

template <class Op>
struct Scratch : SecondOrder<Op> {
  float *taps, *row;
  Scratch(const Call& c, Arena& arena) : SecondOrder<Op>(c, arena) {
    taps = arena.take<float>(taps_size(c));
    row = arena.take<float>(2 * this->s.dp);
  }
};

template <class IO, class Op>
struct Backward : Site<IO, Op> {
  using Base = Site<IO, Op>;
  using Base::c, Base::s, Base::rows, Base::keys, Base::queries;
  bool undo_query, undo_key;
  int64_t group;  // rows whose cotangents are in memory at once
  int64_t query_taps, key_taps;                     // sizes of TapSums
  float *fast_sums, *slow_sums;                     // [rows, chunks, weights]: cotangents of fast and of given weights
  float* cotangents;                                // [group, N, dp]
  float *query_tap_sums, *key_tap_sums, *products;  // [rows, chunks, taps]; [rows, chunks]: <C, G>
  float* moments;                                   // [rows, 2, dp]: means of dkn and dkn * kn
  Op *slow, *fast, *step;                           // operands: weights [heads], [rows], cotangent of G [rows]
  int64_t workspace;

  explicit Backward(const Call& c) : Base(c), undo_query(c.conv_query.weight), undo_key(c.conv_key.weight || c.normed) {
    Arena arena(c.workspace);
    query_taps = undo_query ? TapSums::size(c.conv_query, s.dp) : 0;
    key_taps = undo_key ? TapSums::size(c.conv_key, s.dp) : 0;
    fast_sums = arena.take<float>(rows * queries.count * s.weights());
    slow_sums = arena.take<float>(rows * keys.count * s.weights());
    constexpr int64_t ITEMS_PER_THREAD = 4;
    int64_t chunks = std::max<int64_t>(1, std::min(keys.count, queries.count));
    group = std::min(std::max<int64_t>(1, rows), divide_up(ITEMS_PER_THREAD * c.threads, chunks));
    int64_t tokens = std::max(undo_query ? c.queries : 0, undo_key ? c.tokens : 0);
    cotangents = arena.take<float>(group * tokens * s.dp);
    query_tap_sums = arena.take<float>(rows * queries.count * query_taps);
    key_tap_sums = arena.take<float>(rows * keys.count * key_taps);
    products = arena.take<float>(rows * keys.count);
    moments = arena.take<float>(rows * 2 * s.dp);
    slow = arena.take<Op>(c.heads * Weights<Op>::size(s));
    fast = arena.take<Op>(rows * Weights<Op>::size(s));
    step = arena.take<Op>(rows * Weights<Op>::size(s));
    workspace = arena.used(c.workspace);
  }

  void run() {
    use_huge_pages(c.query_grad.data, rows * c.queries * s.d * sizeof(IO));
    use_huge_pages(c.key_grad.data, rows * c.tokens * s.d * sizeof(IO));
    use_huge_pages(c.value_grad.data, rows * c.tokens * s.v * sizeof(IO));
    use_huge_pages(c.workspace, workspace);
    for_items(c.heads, PAIRED<Op>, [&](int64_t head) { this->pack(c.weights, head, slow); });
    this->for_rows([&](int64_t row) { this->pack(c.fast, row, fast); });
    for (int64_t first = 0; first < rows; first += group) {
      in_group(first, queries, [&](int64_t row, int64_t chunk) { query_pass(row, chunk); });
      if (undo_query) in_group(first, queries, [&](int64_t row, int64_t chunk) { undo_queries(row, chunk); });
    }
    this->for_rows([&](int64_t row) { turn(row); });
    for (int64_t first = 0; first < rows; first += group) {
      in_group(first, keys, [&](int64_t row, int64_t chunk) { key_pass(row, chunk); });
      for (int64_t row = first; row < std::min(rows, first + group); ++row) join(row);
      if (undo_key) in_group(first, keys, [&](int64_t row, int64_t chunk) { undo_keys(row, chunk); });
    }
    for_items(c.heads, PAIRED<Op>, [&](int64_t head) { finish(head); });
  }

  template <class F>
  void in_group(int64_t first, const Chunks& chunks, const F& f) const {
    int64_t count = std::min(group, rows - first);
    for_items(count * chunks.count, PAIRED<Op>, [&](int64_t i) { f(first + i / chunks.count, i % chunks.count); });
  }

  float* fast_sum(int64_t row, int64_t chunk = 0) { return fast_sums + (row * queries.count + chunk) * s.weights(); }
  float* slow_sum(int64_t row, int64_t chunk = 0) { return slow_sums + (row * keys.count + chunk) * s.weights(); }
  TapSums query_sum(int64_t row, int64_t chunk = 0) {
    return {query_tap_sums + (row * queries.count + chunk) * query_taps, s.dp, taps_of(c.conv_query)};
  }
  TapSums key_sum(int64_t row, int64_t chunk = 0) {
    return {key_tap_sums + (row * keys.count + chunk) * key_taps, s.dp, taps_of(c.conv_key)};
  }
  Tokens<float> cotangent(int64_t row, int64_t tokens) const {
    return Tokens<float>(View{cotangents, 0, tokens * s.dp, s.dp}, 0, row % group, s.d, nullptr);
  }

  void query_pass(int64_t row, int64_t chunk) {
    auto block = this->template scratch<Scratch<Op>>();
    Tokens<IO> query = this->query(row), grad = this->view(c.output, row, s.v), out = this->view(c.query_grad, row, s.d);
    Tokens<float> kept = cotangent(row, c.queries);
    Taps taps = prepare_taps(c, c.conv_query, this->head(row), s.d, nullptr, block.taps);
    Weights<Op> w = this->weights(fast, row);
    std::memset(fast_sum(row, chunk), 0, s.weights() * sizeof(float));
    if (undo_query) std::memset(query_sum(row, chunk).inside, 0, query_taps * sizeof(float));
    this->for_blocks(queries, chunk, [&](int64_t from, int64_t count, int64_t padded) {
      this->load_queries(query, taps, from, count, padded, block.x);
      copy_block(grad, from, count, padded, block.e);
      prefetch(query, from + BLOCK + reach(taps), c.queries);
      prefetch(grad, from + BLOCK, c.queries);
      if (!undo_query) prefetch<true>(out, from, c.queries);
      block.template step<true>(padded, w, false, Sums(fast_sum(row, chunk), s));
      gemm(padded, s.dp, s.wide, block.g.plain, s.wide, w.in_t, s.dp, block.y, s.dp);
      if (undo_query) {
        store_block(block.y, kept, from, count);
        add_tap_sums(query, taps, from, count, block.y, query_sum(row, chunk));
      } else {
        store_block(block.y, out, from, count);
      }
    });
  }

  // From the cotangent of the fast weights to that of G.
  void turn(int64_t row) {
    this->add_up(fast_sum(row), queries.count, s.weights());
    float factor = (c.mse ? -1.0f : 1.0f) / float(this->tokens(row));
    Weights<Op> w = this->weights(step, row);
    w.clear(s);
    Sums sums(fast_sum(row), s);
    for (int64_t i = 0; i + 1 < s.layers(); ++i) {
      pack_matrix(w.in, s.wide, 0, i * s.hp, sums.in + i * s.hp, s.wide, 1, s.d, s.hidden, factor);
      pack_matrix(w.in_t, s.dp, i * s.hp, 0, sums.in + i * s.hp, 1, s.wide, s.hidden, s.d, factor);
    }
    pack_matrix(w.out, s.vp, 0, 0, sums.out_t, 1, s.hp, s.hidden, s.v, factor);
    pack_matrix(w.out_t, s.hp, 0, 0, sums.out_t, s.hp, 1, s.v, s.hidden, factor);
  }

  void key_pass(int64_t row, int64_t chunk) {
    auto block = this->template scratch<Scratch<Op>>();
    Tokens<IO> key = this->key(row), value = this->value(row);
    Tokens<IO> key_out = this->view(c.key_grad, row, s.d), value_out = this->view(c.value_grad, row, s.v);
    Tokens<float> kept = cotangent(row, c.tokens);
    Taps taps = prepare_taps(c, c.conv_key, this->head(row), s.d, this->stats(row), block.taps);
    Weights<Op> w = this->weights(slow, this->head(row)), cot = this->weights(step, row);
    float rate = c.rate[this->head(row)];
    double product = 0;
    std::memset(slow_sum(row, chunk), 0, s.weights() * sizeof(float));
    if (undo_key) std::memset(key_sum(row, chunk).inside, 0, key_taps * sizeof(float));
    this->for_blocks(keys, chunk, [&](int64_t from, int64_t count, int64_t padded) {
      this->load_keys(key, taps, from, count, padded, block.x);
      copy_block(value, from, count, padded, block.e);
      prefetch(key, from + BLOCK + reach(taps), c.tokens);
      prefetch(value, from + BLOCK, c.tokens);
      prefetch<true>(value_out, from, c.tokens);
      if (!undo_key) prefetch<true>(key_out, from, c.tokens);
      product += block.backward(padded, w, cot, c.mse, Sums(slow_sum(row, chunk), s));
      store_block(block.de, value_out, from, count, rate);
      if (undo_key) {
        for (int64_t i = 0; i < count * s.dp; i += LANES) store(block.y + i, load(block.y + i) * splat(rate));
        store_block(block.y, kept, from, count);
        add_tap_sums(key, taps, from, count, block.y, key_sum(row, chunk));
      } else {
        store_block(block.y, key_out, from, count, rate);
      }
    });
    products[row * keys.count + chunk] = float(product);
  }

  // Sums over chunks; the moments that key norm's backward needs; the row's cotangents of its head's weights.
  void join(int64_t row) {
    this->add_up(slow_sum(row), keys.count, s.weights());
    float rate = c.rate[this->head(row)];
    for (int64_t i = 0; i < s.weights(); i += LANES) {
      store(slow_sum(row) + i, load(slow_sum(row) + i) * splat(rate) + load(fast_sum(row) + i));
    }
    if (undo_query) this->add_up(query_sum(row).inside, queries.count, query_taps);
    if (undo_key) this->add_up(key_sum(row).inside, keys.count, key_taps);
    if (c.normed) {
      TapSums sums = key_sum(row);
      int64_t count = c.conv_key.weight ? taps_of(c.conv_key) : 0;
      for (int64_t i = 0; i < s.d; ++i) {
        float scale = Base::stats(row)[s.d + i];
        double plain = sums.outside[i], product = sums.outside_product[i];
        for (int64_t tap = 0; tap < count; ++tap) {
          float w = c.conv_key.weight[(this->head(row) * s.d + i) * count + tap] + (tap == count / 2 ? 1.0f : 0.0f);
          plain += double(w) * sums.seen[tap * s.dp + i];
          product += double(w) * sums.product[tap * s.dp + i];
        }
        moments[row * 2 * s.dp + i] = float(plain / double(this->tokens(row)));
        moments[row * 2 * s.dp + s.dp + i] = float(product * scale / double(this->tokens(row)));
      }
    }
  }

  // Sums over the batch: the gradients of what the heads own.
  void finish(int64_t head) {
    for (int64_t i = 0; i < s.layers(); ++i) {
      float* out = c.weights_grad[i] + head * this->layer_size(i);
      std::memset(out, 0, this->layer_size(i) * sizeof(float));
      for (int64_t row = head; row < rows; row += c.heads) {
        this->for_weights(i, Sums(slow_sum(row), s), [&](int64_t at, float sum) { out[at] += sum; });
      }
    }
    double rate = 0;
    for (int64_t row = head; row < rows; row += c.heads) {
      for (int64_t chunk = 0; chunk < keys.count; ++chunk) rate += products[row * keys.count + chunk];
    }
    c.rate_grad[head] = float(rate);
    if (c.conv_query.weight) finish_convolution(c.conv_query, head, false);
    if (c.conv_key.weight) finish_convolution(c.conv_key, head, c.normed);
  }

  void finish_convolution(const Convolution& conv, int64_t head, bool normed) {
    int64_t count = taps_of(conv);
    std::fill_n(conv.weight_grad + head * s.d * count, s.d * count, 0.0f);
    if (conv.bias) std::fill_n(conv.bias_grad + head * s.d, s.d, 0.0f);
    for (int64_t row = head; row < rows; row += c.heads) {
      TapSums sums = &conv == &c.conv_query ? query_sum(row) : key_sum(row);
      for (int64_t i = 0; i < s.d; ++i) {
        float scale = normed ? Base::stats(row)[s.d + i] : 1.0f;
        for (int64_t tap = 0; tap < count; ++tap) {
          conv.weight_grad[(head * s.d + i) * count + tap] += sums.product[tap * s.dp + i] * scale;
        }
        if (conv.bias) conv.bias_grad[head * s.d + i] += sums.inside[i];
      }
    }
  }

  void undo_queries(int64_t row, int64_t chunk) {
    auto block = this->template scratch<Scratch<Op>>();
    Tokens<float> in = cotangent(row, c.queries);
    Tokens<IO> out = this->view(c.query_grad, row, s.d);
    Taps taps = prepare_taps(c, c.conv_query, this->head(row), s.d, nullptr, block.taps, true);
    this->for_blocks(queries, chunk, [&](int64_t from, int64_t count, int64_t padded) {
      prefetch<true>(out, from, c.queries);
      load_block(in, taps, from, count, block.x);
      clear_rows(block.x, s.dp, this->keep_query(row), from, count, padded);
      store_block(block.x, out, from, count);
    });
  }

  // dk = (dkn - mean(dkn) - kn mean(dkn kn)) / deviation
  void undo_keys(int64_t row, int64_t chunk) {
    auto block = this->template scratch<Scratch<Op>>();
    Tokens<float> in = cotangent(row, c.tokens);
    Tokens<IO> key = this->key(row), out = this->view(c.key_grad, row, s.d);
    Taps taps = prepare_taps(c, c.conv_key, this->head(row), s.d, nullptr, block.taps, true);
    float *mean = block.row, *scale = block.row + s.dp;
    std::memset(mean, 0, 2 * s.dp * sizeof(float));
    if (c.normed) {
      std::copy_n(Base::stats(row), s.d, mean);
      std::copy_n(Base::stats(row) + s.d, s.d, scale);
    }
    this->for_blocks(keys, chunk, [&](int64_t from, int64_t count, int64_t padded) {
      prefetch<true>(out, from, c.tokens);
      prefetch(key, from, c.tokens);
      load_block(in, taps, from, count, block.x);
      if (c.normed) {
        for (int64_t i = 0; i < s.d; i += LANES) {
          Vec m = load(mean + i), sc = load(scale + i), plain = load(moments + row * 2 * s.dp + i);
          Vec product = load(moments + row * 2 * s.dp + s.dp + i) * sc;
          for (int64_t n = 0; n < count; ++n) {
            Vec centred = load(key.data + (from + n) * key.stride + i, lanes(s.d, i)) - m;
            float* at = block.x + n * s.dp + i;
            store(at, (load(at) - plain - centred * product) * sc);
          }
        }
      }
      clear_rows(block.x, s.dp, key.keep, from, count, padded);
      store_block(block.x, out, from, count);
    });
  }
};

}  // namespace

int64_t backward(const Call& c, bool run) {
  return with_types(c, [&](auto io, auto op) {
    Backward<decltype(io), decltype(op)> backward(c);
    if (run) backward.run();
    return backward.workspace;
  });
}

}  // namespace t5fx

extern "C" int64_t t5fx_backward(const t5fx::Call* call, int run, char* error, int64_t size) {
  return t5fx::guarded(error, size, [&] { return t5fx::backward(*call, run); });
}
