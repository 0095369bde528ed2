// Compiled once per instruction set by each_set.h.

// Outputs [first, first + count) of one row: every unit is read once for them all.
ECRM_INLINE void decode_outputs(const uint8_t* const* units, int64_t k, const uint8_t* matrix, int64_t first, int count,
                                uint8_t* const* outputs, int64_t width) {
  int64_t at = 0;
  while (at < width) {
    const int64_t rest = width - at < kLane ? width - at : kLane;
    Lane sums[4] = {};
    for (int64_t unit = 0; unit < k; ++unit) {
      const Lane value = rest == kLane ? lane_load(units[unit] + at) : lane_load_part(units[unit] + at, rest);
      for (int w = 0; w < count; ++w) {
        const uint8_t coefficient = matrix[(first + w) * k + unit];
        if (coefficient == 1) {
          sums[w] ^= value;
        } else if (coefficient != 0) {
          sums[w] ^= lane_times(value, factor(coefficient));
        }
      }
    }
    for (int w = 0; w < count; ++w) {
      if (rest == kLane) {
        lane_store(outputs[first + w] + at, sums[w]);
      } else {
        lane_store_part(outputs[first + w] + at, sums[w], rest);
      }
    }
    at += rest;
  }
}

static void decode_row(const uint8_t* const* units, int64_t k, const uint8_t* matrix, int64_t wanted,
                       uint8_t* const* outputs, int64_t width) {
  int64_t first = 0;
  for (; first + 4 <= wanted; first += 4) decode_outputs(units, k, matrix, first, 4, outputs, width);
  if (wanted - first == 3) decode_outputs(units, k, matrix, first, 3, outputs, width);
  if (wanted - first == 2) decode_outputs(units, k, matrix, first, 2, outputs, width);
  if (wanted - first == 1) decode_outputs(units, k, matrix, first, 1, outputs, width);
}
