// Compiled once per instruction set by each_set.h.

constexpr int64_t kRowsAhead = 16;

// Element by element, one addition each, in the order of `index`: no instruction set can change a bit of the result.
static void add(float* out, int64_t out_stride, const int64_t* index, int64_t n, const float* values,
                int64_t value_stride, int64_t dimension) {
  for (int64_t i = 0; i < n; ++i) {
    if (i + kRowsAhead < n) {
      const float* next = out + index[i + kRowsAhead] * out_stride;
      for (int64_t d = 0; d < dimension && d < 256; d += 16) __builtin_prefetch(next + d, 1, 3);
    }
    float* target = out + index[i] * out_stride;
    const float* source = values + i * value_stride;
    int64_t d = 0;
    for (; d + 8 <= dimension; d += 8) {
      Floats sum, value;
      memcpy(&sum, target + d, sizeof sum);
      memcpy(&value, source + d, sizeof value);
      sum += value;
      memcpy(target + d, &sum, sizeof sum);
    }
    for (; d < dimension; ++d) target[d] += source[d];
  }
}
