// Compiled once per instruction set by each_set.h.

// Computes `lanes` lanes of the outputs [first, first + count), from position `at` on. A unit is
// read once for all outputs, and a coefficient once for all lanes. With `part` > 0 there is a
// single lane, with only `part` bytes.
ECRM_INLINE void decode_lanes(const uint8_t* const* units, int64_t k, const uint8_t* matrix,
                              int64_t first, int count, uint8_t* const* outputs, int64_t at,
                              int lanes, int64_t part) {
  Lane sums[4][4] = {};
  for (int64_t unit = 0; unit < k; ++unit) {
    Lane values[4];
    for (int lane = 0; lane < lanes; ++lane) {
      const uint8_t* from = units[unit] + at + lane * kLane;
      values[lane] = part > 0 ? lane_load_part(from, part) : lane_load(from);
    }
    for (int w = 0; w < count; ++w) {
      const uint8_t coefficient = matrix[(first + w) * k + unit];
      if (coefficient == 1) {
        for (int lane = 0; lane < lanes; ++lane) sums[w][lane] ^= values[lane];
      } else if (coefficient != 0) {
        const Factor f = factor(coefficient);
        for (int lane = 0; lane < lanes; ++lane) sums[w][lane] ^= lane_times(values[lane], f);
      }
    }
  }
  for (int w = 0; w < count; ++w) {
    for (int lane = 0; lane < lanes; ++lane) {
      uint8_t* to = outputs[first + w] + at + lane * kLane;
      if (part > 0) {
        lane_store_part(to, sums[w][lane], part);
      } else {
        lane_store(to, sums[w][lane]);
      }
    }
  }
}

ECRM_INLINE void decode_outputs(const uint8_t* const* units, int64_t k, const uint8_t* matrix,
                                int64_t first, int count, uint8_t* const* outputs, int64_t width) {
  int64_t at = 0;
  for (; at + 4 * kLane <= width; at += 4 * kLane)
    decode_lanes(units, k, matrix, first, count, outputs, at, 4, 0);
  for (; at + kLane <= width; at += kLane)
    decode_lanes(units, k, matrix, first, count, outputs, at, 1, 0);
  if (at < width) decode_lanes(units, k, matrix, first, count, outputs, at, 1, width - at);
}

static void decode_row(const uint8_t* const* units, int64_t k, const uint8_t* matrix,
                       int64_t wanted, uint8_t* const* outputs, int64_t width) {
  int64_t first = 0;
  for (; first + 4 <= wanted; first += 4)
    decode_outputs(units, k, matrix, first, 4, outputs, width);
  if (wanted - first == 3) decode_outputs(units, k, matrix, first, 3, outputs, width);
  if (wanted - first == 2) decode_outputs(units, k, matrix, first, 2, outputs, width);
  if (wanted - first == 1) decode_outputs(units, k, matrix, first, 1, outputs, width);
}
