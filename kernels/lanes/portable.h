// Lanes of 16 bytes in plain C++ (GCC vectors: SSE2 on x86-64, NEON on aarch64).
// Included by each_set.h inside a namespace, once; README.md lists the names to define.

constexpr int64_t kLane = 16;
typedef uint64_t Lane __attribute__((vector_size(16)));
struct Factor {
  Lane bit[8];  // bit[b]: all ones if bit b of the coefficient is set
};

ECRM_INLINE Lane lane_load(const uint8_t* from) {
  Lane value;
  memcpy(&value, from, sizeof value);
  return value;
}
ECRM_INLINE void lane_store(uint8_t* to, Lane value) { memcpy(to, &value, sizeof value); }
ECRM_INLINE Lane lane_load_part(const uint8_t* from, int64_t bytes) {
  Lane value = {};
  memcpy(&value, from, static_cast<size_t>(bytes));
  return value;
}
ECRM_INLINE void lane_store_part(uint8_t* to, Lane value, int64_t bytes) {
  memcpy(to, &value, static_cast<size_t>(bytes));
}

ECRM_INLINE Factor factor(uint8_t coefficient) {
  Factor f;
  for (int bit = 0; bit < 8; ++bit) {
    const uint64_t all = coefficient >> bit & 1 ? ~0ull : 0ull;
    f.bit[bit] = Lane{all, all};
  }
  return f;
}
// Shift and add, eight bytes to a word: value runs through v, 2v, 4v, ... 128v.
ECRM_INLINE Lane lane_times(Lane value, const Factor& f) {
  Lane product = {};
  for (int bit = 0; bit < 8; ++bit) {
    product ^= value & f.bit[bit];
    const Lane top = value & 0x8080808080808080ull;
    const Lane carry = (top << 1) - (top >> 7);  // 0xff in bytes with a set top bit
    value = ((value ^ top) << 1) ^ (carry & 0x1d1d1d1d1d1d1d1dull);
  }
  return product;
}

constexpr int64_t kFloats = 4;
#include "floats.h"

ECRM_INLINE Floats floats_fused(Floats a, Floats b, Floats c) {
  for (int i = 0; i < kFloats; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
ECRM_INLINE void floats_stream(float* to, Floats value) { memcpy(to, &value, sizeof value); }
ECRM_INLINE void stream_end() {}
ECRM_INLINE Floats floats_sqrt(Floats a) {
  for (int i = 0; i < kFloats; ++i) a[i] = __builtin_sqrtf(a[i]);
  return a;
}
ECRM_INLINE Doubles doubles_sqrt(Doubles a) {
  for (int i = 0; i < kFloats; ++i) a[i] = __builtin_sqrt(a[i]);
  return a;
}
#include "half_by_hand.h"
