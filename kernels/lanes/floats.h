// GCC vectors of kFloats elements; the lane file sets kFloats to the floats of one register.
// Arithmetic on vectors rounds every element like a scalar.
typedef float Floats __attribute__((vector_size(4 * kFloats)));
typedef uint32_t Words __attribute__((vector_size(4 * kFloats)));   // the bits of floats
typedef uint16_t Halves __attribute__((vector_size(2 * kFloats)));  // 16-bit floats, as bits
typedef double Doubles __attribute__((vector_size(8 * kFloats)));
