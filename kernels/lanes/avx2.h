// Lanes of 32 bytes with AVX2: products by two table look-ups of four bits each (pshufb).
// Included by each_set.h inside a namespace, once; README.md lists the names to define.

constexpr int64_t kLane = 32;
typedef __m256i Lane;
struct Factor {
  __m256i low, high;
};

ECRM_INLINE Lane lane_load(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
ECRM_INLINE void lane_store(uint8_t* to, Lane value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), value);
}
ECRM_INLINE Lane lane_load_part(const uint8_t* from, int64_t bytes) {
  alignas(32) uint8_t buffer[32] = {};
  memcpy(buffer, from, static_cast<size_t>(bytes));
  return lane_load(buffer);
}
ECRM_INLINE void lane_store_part(uint8_t* to, Lane value, int64_t bytes) {
  alignas(32) uint8_t buffer[32];
  lane_store(buffer, value);
  memcpy(to, buffer, static_cast<size_t>(bytes));
}

ECRM_INLINE Factor factor(uint8_t coefficient) {
  Factor f;
  f.low = _mm256_broadcastsi128_si256(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(field.low[coefficient])));
  f.high = _mm256_broadcastsi128_si256(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(field.high[coefficient])));
  return f;
}
ECRM_INLINE Lane lane_times(Lane value, const Factor& f) {
  const __m256i nibble = _mm256_set1_epi8(0x0f);
  const __m256i low = _mm256_shuffle_epi8(f.low, _mm256_and_si256(value, nibble));
  const __m256i high =
      _mm256_shuffle_epi8(f.high, _mm256_and_si256(_mm256_srli_epi64(value, 4), nibble));
  return _mm256_xor_si256(low, high);
}

constexpr int64_t kFloats = 8;
#include "floats.h"

ECRM_INLINE Floats floats_fused(Floats a, Floats b, Floats c) {
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
ECRM_INLINE void floats_stream(float* to, Floats value) { _mm256_stream_ps(to, (__m256)value); }
ECRM_INLINE void stream_end() { _mm_sfence(); }
ECRM_INLINE Floats floats_sqrt(Floats a) { return (Floats)_mm256_sqrt_ps((__m256)a); }
ECRM_INLINE Doubles doubles_sqrt(Doubles a) {
  __m256d x[2];
  memcpy(x, &a, sizeof a);
  for (int i = 0; i < 2; ++i) x[i] = _mm256_sqrt_pd(x[i]);
  memcpy(&a, x, sizeof a);
  return a;
}
ECRM_INLINE Floats floats_from_half(Halves bits) { return (Floats)_mm256_cvtph_ps((__m128i)bits); }
ECRM_INLINE Halves floats_to_half(Floats values) {
  return (Halves)_mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT);
}
