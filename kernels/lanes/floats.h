// GCC vectors of kFloats elements; the lane file sets kFloats to the floats of one register.
// Arithmetic on vectors rounds every element like a scalar.
typedef float Floats __attribute__((vector_size(4 * kFloats)));
typedef uint32_t Words __attribute__((vector_size(4 * kFloats)));   // the bits of floats
typedef uint16_t Halves __attribute__((vector_size(2 * kFloats)));  // 16-bit floats, as bits
typedef double Doubles __attribute__((vector_size(8 * kFloats)));

// The nearest bfloat16, ties to even, as float32. A NaN stays a NaN.
ECRM_INLINE Floats floats_to_bfloat16(Floats value) {
  Words bits;
  memcpy(&bits, &value, sizeof bits);
  const Words nearest = bits + 0x7fffu + (bits >> 16 & 1u);
  bits = ((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : nearest) & 0xffff0000u;
  memcpy(&value, &bits, sizeof value);
  return value;
}
ECRM_INLINE float float_to_bfloat16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  const uint32_t nearest = bits + 0x7fffu + (bits >> 16 & 1u);
  bits = ((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : nearest) & 0xffff0000u;
  memcpy(&value, &bits, sizeof value);
  return value;
}
