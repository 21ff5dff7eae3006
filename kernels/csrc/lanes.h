// Sixteen floats at a time: loads that widen, stores that round, sigmoid, transposition. AVX-512 throughout.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <immintrin.h>

#include <cstdint>

namespace t5fx {

using Vec = __m512;  // GCC and Clang give it + - * and contract a * b + c to one instruction
using Mask = __mmask16;

inline Vec splat(float x) { return _mm512_set1_ps(x); }
inline Vec zero() { return _mm512_setzero_ps(); }

// The lanes of channels [c, c + 16) that exist.
inline Mask lanes(int64_t channels, int64_t c) {
  int64_t left = channels - c;
  return left >= 16 ? Mask(0xFFFF) : left <= 0 ? Mask(0) : Mask((1u << left) - 1);
}

inline Vec widen(__m256i x, c10::BFloat16) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
inline Vec widen(__m256i x, c10::Half) { return _mm512_cvtph_ps(x); }

inline __m256i narrow(Vec x, c10::BFloat16) {
#ifdef __AVX512BF16__
  return __m256i(_mm512_cvtneps_pbh(x));
#else
  // To nearest even; a nan stays one.
  __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7FC00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}
inline __m256i narrow(Vec x, c10::Half) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline Vec load(const float* p, Mask m) { return _mm512_maskz_loadu_ps(m, p); }
inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
template <class T>
Vec load(const T* p, Mask m) {
  return widen(_mm256_maskz_loadu_epi16(m, p), T());
}

inline void store(float* p, Vec x, Mask m) { _mm512_mask_storeu_ps(p, m, x); }
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
template <class T>
void store(T* p, Vec x, Mask m) {
  _mm256_mask_storeu_epi16(p, m, narrow(x, T()));
}
template <class T>
void store(T* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x, T()));
}

// exp(x) for |x| <= 87, relative error below 2e-7: 2^n times a polynomial on [-ln2 / 2, ln2 / 2].
inline Vec exp(Vec x) {
  Vec n = _mm512_roundscale_ps(x * splat(1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Vec r = (x - n * splat(0.693359375f)) + n * splat(2.12194440e-4f);  // ln2 in two parts
  Vec p = splat(1.0f / 720);
  p = p * r + splat(1.0f / 120);
  p = p * r + splat(1.0f / 24);
  p = p * r + splat(1.0f / 6);
  p = p * r + splat(0.5f);
  p = p * r + splat(1.0f);
  p = p * r + splat(1.0f);
  return _mm512_scalef_ps(p, n);
}

inline Vec sigmoid(Vec x) {
  // The operands' order lets a nan pass.
  Vec clamped = _mm512_max_ps(splat(-87.0f), _mm512_min_ps(splat(87.0f), zero() - x));
  Vec d = splat(1.0f) + exp(clamped);
  Vec y = _mm512_rcp14_ps(d);
  return y * (splat(2.0f) - d * y);  // one Newton step: 14 bits become 24
}

// Sixteen rows become sixteen columns: r[i][j] -> r[j][i].
inline void transpose(Vec r[16]) {
  Vec t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      __m512d low = _mm512_castps_pd(t[i + j]), high = _mm512_castps_pd(t[i + j + 2]);
      r[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      r[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  }
  // r[4g + k] holds column 4l + k of rows 4g.. in its 128-bit lane l: now the lanes trade places.
  for (int k = 0; k < 4; ++k) {
    Vec a = _mm512_shuffle_f32x4(r[k], r[4 + k], 0x88), b = _mm512_shuffle_f32x4(r[8 + k], r[12 + k], 0x88);
    Vec c = _mm512_shuffle_f32x4(r[k], r[4 + k], 0xDD), d = _mm512_shuffle_f32x4(r[8 + k], r[12 + k], 0xDD);
    t[k] = _mm512_shuffle_f32x4(a, b, 0x88);
    t[8 + k] = _mm512_shuffle_f32x4(a, b, 0xDD);
    t[4 + k] = _mm512_shuffle_f32x4(c, d, 0x88);
    t[12 + k] = _mm512_shuffle_f32x4(c, d, 0xDD);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

}  // namespace t5fx
