// Compiled once per instruction set by each_set.h.

// Returns whether all quotients are finite. The compiler turns the plain loops into vectors.
static int divide(float* out, const float* values, int64_t n, float divisor) {
  constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;
  int32_t largest = 0;  // of the bits of magnitudes: ordered as the magnitudes, NaN above infinity
  if (out == values && divisor == 1.0f) {
    for (int64_t i = 0; i < n; ++i) {
      int32_t bits;
      memcpy(&bits, values + i, sizeof bits);
      bits &= kMagnitude;
      largest = bits > largest ? bits : largest;
    }
    return largest < kInfinity;
  }
  for (int64_t i = 0; i < n; ++i) {
    const float quotient = values[i] / divisor;
    int32_t bits;
    memcpy(&bits, &quotient, sizeof bits);
    out[i] = quotient;
    bits &= kMagnitude;
    largest = bits > largest ? bits : largest;
  }
  return largest < kInfinity;
}
