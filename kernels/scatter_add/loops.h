// Compiled once per instruction set by each_set.h.

constexpr int64_t kRowsAhead = 24;

// Element by element, one addition each, in the order of `index`: no instruction set can change a bit of the result.
static void add(float* out, int64_t out_stride, const int64_t* index, int64_t n, const float* values,
                int64_t value_stride, int64_t dimension) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t next = index[i + kRowsAhead < n ? i + kRowsAhead : n - 1];
    fetch_row(reinterpret_cast<const uint8_t*>(out + next * out_stride), 4 * dimension);
    float* target = out + index[i] * out_stride;
    const float* source = values + i * value_stride;
    int64_t d = 0;
    for (; d + kFloats <= dimension; d += kFloats) {
      Floats sum, value;
      memcpy(&sum, target + d, sizeof sum);
      memcpy(&value, source + d, sizeof value);
      sum += value;
      memcpy(target + d, &sum, sizeof sum);
    }
    for (; d < dimension; ++d) target[d] += source[d];
  }
}
