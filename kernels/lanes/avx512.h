// Lanes of 64 bytes with AVX-512. With ECRM_LANES_GFNI of 1, one vgf2p8affineqb makes the products
// of 64 bytes; vgf2p8mulb is of no use, because the instruction's polynomial is 0x11b. Else two
// table look-ups of four bits (pshufb) make the products. Included by each_set.h inside a
// namespace, once per value of ECRM_LANES_GFNI; see README.md.

constexpr int64_t kLane = 64;
typedef __m512i Lane;

ECRM_INLINE Lane lane_load(const uint8_t* from) { return _mm512_loadu_si512(from); }
ECRM_INLINE void lane_store(uint8_t* to, Lane value) { _mm512_storeu_si512(to, value); }
ECRM_INLINE Lane lane_load_part(const uint8_t* from, int64_t bytes) {
  return _mm512_maskz_loadu_epi8(~0ull >> (64 - bytes), from);
}
ECRM_INLINE void lane_store_part(uint8_t* to, Lane value, int64_t bytes) {
  _mm512_mask_storeu_epi8(to, ~0ull >> (64 - bytes), value);
}

#if ECRM_LANES_GFNI
struct Factor {
  __m512i matrix;
};
ECRM_INLINE Factor factor(uint8_t coefficient) {
  return {_mm512_set1_epi64(static_cast<long long>(field.affine[coefficient]))};
}
ECRM_INLINE Lane lane_times(Lane value, const Factor& f) {
  return _mm512_gf2p8affine_epi64_epi8(value, f.matrix, 0);
}
#else
struct Factor {
  __m512i low, high;
};
ECRM_INLINE Factor factor(uint8_t coefficient) {
  Factor f;
  f.low = _mm512_broadcast_i32x4(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(field.low[coefficient])));
  f.high = _mm512_broadcast_i32x4(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(field.high[coefficient])));
  return f;
}
ECRM_INLINE Lane lane_times(Lane value, const Factor& f) {
  const __m512i nibble = _mm512_set1_epi8(0x0f);
  const __m512i low = _mm512_shuffle_epi8(f.low, _mm512_and_si512(value, nibble));
  const __m512i high =
      _mm512_shuffle_epi8(f.high, _mm512_and_si512(_mm512_srli_epi64(value, 4), nibble));
  return _mm512_xor_si512(low, high);
}
#endif

constexpr int64_t kFloats = 16;
#include "floats.h"

ECRM_INLINE Floats floats_fused(Floats a, Floats b, Floats c) {
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
ECRM_INLINE void floats_stream(float* to, Floats value) { _mm512_stream_ps(to, (__m512)value); }
ECRM_INLINE void stream_end() { _mm_sfence(); }
ECRM_INLINE Floats floats_sqrt(Floats a) { return (Floats)_mm512_sqrt_ps((__m512)a); }
ECRM_INLINE Doubles doubles_sqrt(Doubles a) {
  __m512d x[2];
  memcpy(x, &a, sizeof a);
  for (int i = 0; i < 2; ++i) x[i] = _mm512_sqrt_pd(x[i]);
  memcpy(&a, x, sizeof a);
  return a;
}
ECRM_INLINE Floats floats_from_half(Halves bits) { return (Floats)_mm512_cvtph_ps((__m256i)bits); }
ECRM_INLINE Halves floats_to_half(Floats values) {
  return (Halves)_mm512_cvtps_ph((__m512)values, _MM_FROUND_TO_NEAREST_INT);
}
