// Small matrix products on blocks that stay in cache, and the operand layouts that they want.
//
// brgemm computes C (+)= A B with A row-major. B is row-major in float32; in bfloat16 two consecutive rows are
// interleaved ("pairs": [K / 2, N, 2]), as the dot-product instructions read them. Accumulation is in float32.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>

#include <atomic>
#include <cstdlib>
#include <memory>
#include <type_traits>

#include "call.h"
#include "lanes.h"

namespace t5fx {

template <class Op>
constexpr bool PAIRED = !std::is_same_v<Op, float>;

// C [m, n] (+)= A [m, k] B [k, n]; B as pack_matrix or Operand::pairs lay it out.
template <class Op>
void gemm(int64_t m, int64_t n, int64_t k, const Op* a, int64_t lda, const Op* b, int64_t ldb, float* c, int64_t ldc,
          bool add = false) {
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, a, b, c, PAIRED<Op>);
}

// Writes source[k, n] * factor at (row + k, column + n) of a B operand with rows of ld; the operand was zeroed before.
template <class Op>
void pack_matrix(Op* b, int64_t ld, int64_t row, int64_t column, const float* source, int64_t stride_k,
                 int64_t stride_n, int64_t rows, int64_t columns, float factor = 1.0f) {
  for (int64_t k = row; k < row + rows; ++k) {
    Op* out = PAIRED<Op> ? b + k / 2 * 2 * ld + column * 2 + k % 2 : b + k * ld + column;
    const float* in = source + (k - row) * stride_k;
    for (int64_t n = 0; n < columns; ++n) out[n * (PAIRED<Op> ? 2 : 1)] = static_cast<Op>(in[n * stride_n] * factor);
  }
}

// A matrix in the making that later products read as A (`plain`) or as B (`pairs`); in float32 they are one.
template <class Op>
struct Operand {
  Op *plain = nullptr, *pairs = nullptr;
  int64_t ld = 0;

  // Rows t and t + 1, t even, columns [c, c + 16).
  template <bool Plain, bool Pairs>
  void put(int64_t t, int64_t c, Vec first, Vec second) const {
    if constexpr (!PAIRED<Op>) {
      store(plain + t * ld + c, first);
      store(plain + (t + 1) * ld + c, second);
    } else {
      __m256i low = narrow(first, Op()), high = narrow(second, Op());
      if constexpr (Plain) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(plain + t * ld + c), low);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(plain + (t + 1) * ld + c), high);
      }
      if constexpr (Pairs) {
        __m512i both = _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
        _mm512_storeu_si512(pairs + t * ld + c * 2, both);
      }
    }
  }
};

// source [rows, columns] float32, both multiples of 16 -> out [columns, rows].
template <class Op>
void transpose_into(const float* source, int64_t rows, int64_t columns, Op* out) {
  for (int64_t r = 0; r < rows; r += LANES) {
    for (int64_t c = 0; c < columns; c += LANES) {
      Vec tile[16];
      for (int i = 0; i < 16; ++i) tile[i] = load(source + (r + i) * columns + c);
      transpose(tile);
      for (int i = 0; i < 16; ++i) store(out + (c + i) * rows + r, tile[i]);
    }
  }
}

// source [rows, columns] as an A operand: itself in float32, else rounded into `out`.
template <class Op>
const Op* round_into(const float* source, int64_t size, Op* out) {
  if constexpr (!PAIRED<Op>) {
    return source;
  } else {
    for (int64_t i = 0; i < size; i += LANES) store(out + i, load(source + i));
    return out;
  }
}

// Cuts pieces, each on a cache line, from one buffer.
class Arena {
 public:
  explicit Arena(void* base) : next_(static_cast<char*>(base)) {}
  template <class T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(next_);
    next_ += round_up(count * int64_t(sizeof(T)), 64);
    return piece;
  }
  int64_t used(const void* base) const { return next_ - static_cast<const char*>(base); }

 private:
  char* next_;
};

// This thread's scratch, kept from call to call: asking the system for it each time costs small problems dear.
inline void* thread_scratch(int64_t bytes) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<void, Free> buffer;
  thread_local int64_t size = 0;
  if (size < bytes) {
    size = round_up(bytes, 4096);
    buffer.reset(std::aligned_alloc(4096, size));
    if (!buffer) {
      size = 0;
      throw std::bad_alloc();
    }
  }
  return buffer.get();
}

// f(item) for all items; threads take the next one as they become free, which bits do not depend on.
template <class F>
void for_items(int64_t items, bool paired, const F& f) {
  std::atomic<int64_t> next{0};
  int64_t threads = std::min<int64_t>(items, at::get_num_threads());
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1)) < items;) f(i);
    at::native::cpublas::brgemm_release(paired);
  });
}

}  // namespace t5fx
