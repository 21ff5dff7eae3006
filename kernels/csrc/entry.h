// What the C entry points share: the choice of types, and errors that cross into Python as text.
#pragma once

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
