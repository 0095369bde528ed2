// Compiled once per instruction set by each_set.h.

constexpr int64_t kRowsAhead = 24;

// Adds element by element, in the order of `index`: the instruction set changes no bit, except of a
// NaN. A row of `out` with `seen` of 0 counts as `width` zeros, whatever its content; a null `seen`
// is 1 for all rows. Addition i takes value picked[i]; value i if `picked` is null.
static void add(float* out, int64_t out_stride, int64_t width, const int64_t* index, int64_t n,
                const float* values, int64_t value_stride, const int64_t* picked, int64_t dimension,
                uint8_t* seen) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t ahead = i + kRowsAhead < n ? i + kRowsAhead : n - 1;
    fetch_row(reinterpret_cast<const uint8_t*>(out + index[ahead] * out_stride), 4 * dimension);
    if (picked != nullptr) {
      fetch_row<0>(reinterpret_cast<const uint8_t*>(values + picked[ahead] * value_stride),
                   4 * dimension);
    }
    float* target = out + index[i] * out_stride;
    const float* source = values + (picked == nullptr ? i : picked[i]) * value_stride;
    int64_t d = 0;
    if (seen != nullptr && !seen[index[i]]) {
      seen[index[i]] = 1;
      for (; d + kFloats <= dimension; d += kFloats) {
        Floats value;
        memcpy(&value, source + d, sizeof value);
        value += Floats{};  // a negative zero becomes zero
        memcpy(target + d, &value, sizeof value);
      }
      for (; d < dimension; ++d) target[d] = source[d] + 0.0f;
      for (; d < width; ++d) target[d] = 0.0f;
      continue;
    }
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
