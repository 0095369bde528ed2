// Eight floats at a time with AVX2, FMA and F16C; part of lanes/avx2.h and lanes/avx512.h.

typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Integers __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));

ECRM_INLINE Floats floats_fused(Floats a, Floats b, Floats c) { return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
ECRM_INLINE Floats floats_sqrt(Floats a) { return (Floats)_mm256_sqrt_ps((__m256)a); }
ECRM_INLINE Doubles doubles_sqrt(Doubles a) {
  __m256d half[2];
  memcpy(half, &a, sizeof a);
  half[0] = _mm256_sqrt_pd(half[0]);
  half[1] = _mm256_sqrt_pd(half[1]);
  memcpy(&a, half, sizeof a);
  return a;
}
ECRM_INLINE Floats floats_from_half(const uint16_t half[8]) {
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(half)));
}
ECRM_INLINE void floats_to_half(Floats values, uint16_t half[8]) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(half), _mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT));
}
