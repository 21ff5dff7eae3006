// What the C entry points share: the choice of types, and errors that cross into Python as text.
#pragma once

#include <sys/mman.h>

#include <cstdio>
#include <exception>
#include <stdexcept>

#include "call.h"
#include "lanes.h"

namespace t5fx {

// f(type in memory, type of the products' operands). Half-precision products need instructions that few CPUs have:
// float16 is computed in float32.
template <class F>
int64_t with_types(const Call& c, const F& f) {
  switch (c.dtype) {
    case FLOAT32: return f(float(), float());
    case BFLOAT16: return f(c10::BFloat16(), c10::BFloat16());
    case FLOAT16: return f(c10::Half(), float());
    default: throw std::invalid_argument("unknown dtype");
  }
}

// Asks for huge pages under memory that is about to be written for the first time: else a large output costs one page
// fault every 4 KiB, which took a fifth of forward's time where malloc hands memory back to the system.
inline void use_huge_pages(void* memory, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t PAGE = 4096;
  constexpr int64_t WORTH_IT = 8 << 20;
  if (bytes < WORTH_IT) return;
  uintptr_t from = (reinterpret_cast<uintptr_t>(memory) + PAGE - 1) / PAGE * PAGE;
  uintptr_t to = (reinterpret_cast<uintptr_t>(memory) + bytes) / PAGE * PAGE;
  madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);  // advice: it may be declined
#endif
}

// f's result, or -1 and the exception's text in `error`.
template <class F>
int64_t guarded(char* error, int64_t size, const F& f) {
  try {
    return f();
  } catch (const std::exception& e) {
    std::snprintf(error, size, "%s", e.what());
    return -1;
  }
}

}  // namespace t5fx
