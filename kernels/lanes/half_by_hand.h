// Half precision in integer arithmetic, for machines without an instruction for it. Rounds to
// nearest, ties to even.

ECRM_INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7fffu;
  uint32_t bits;
  if (rest >= 0x7c00u) {  // infinity, or a NaN made quiet
    bits = sign | 0x7f800000u | ((rest & 0x3ffu) << 13) | (rest > 0x7c00u ? 0x400000u : 0u);
  } else if (rest >= 0x400u) {
    bits = sign | ((rest << 13) + (112u << 23));
  } else {  // subnormal: rest * 2^-24 is exact
    const float value = static_cast<float>(rest) * 0x1p-24f;
    memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

ECRM_INLINE uint16_t float_to_half(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t rest = bits & 0x7fffffffu;
  uint32_t half;
  if (rest > 0x7f800000u) {
    half = 0x7e00u | (rest >> 13 & 0x3ffu);
  } else if (rest >= 0x47800000u) {  // 65536 and more
    half = 0x7c00u;
  } else if (rest >= 0x38800000u) {
    // normal: a carry out of the fraction rightly moves the exponent up
    half = (rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13;
  } else {  // subnormal: adding 0.5 leaves value / 2^-24, rounded, in the low bits
    float magnitude;
    memcpy(&magnitude, &rest, 4);
    magnitude += 0.5f;
    memcpy(&half, &magnitude, 4);
    half -= 0x3f000000u;
  }
  return static_cast<uint16_t>(sign | half);
}

ECRM_INLINE Floats floats_from_half(Halves bits) {
  Floats values;
  for (int i = 0; i < kFloats; ++i) values[i] = half_to_float(bits[i]);
  return values;
}
ECRM_INLINE Halves floats_to_half(Floats values) {
  Halves bits;
  for (int i = 0; i < kFloats; ++i) bits[i] = float_to_half(values[i]);
  return bits;
}
