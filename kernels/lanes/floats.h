// Vectors of GCC of kFloats elements, which the lane file has set to what one register holds.
// Arithmetic on them rounds each element as a scalar would be.
typedef float Floats __attribute__((vector_size(4 * kFloats)));
typedef uint32_t Words __attribute__((vector_size(4 * kFloats)));   // their bits
typedef uint16_t Halves __attribute__((vector_size(2 * kFloats)));  // 16-bit floats, as bits
typedef double Doubles __attribute__((vector_size(8 * kFloats)));
