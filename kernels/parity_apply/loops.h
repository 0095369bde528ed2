// Compiled once per instruction set by each_set.h.

// How far ahead of the arithmetic memory is asked for: scattered parity rows, which no hardware prefetcher can guess,
// by 8 KiB of rows; the deltas, which lie one after the other, by 2 KiB. Measured on Zen 5 with rows of 256 bytes.
constexpr int64_t kParityBytesAhead = 8192;
constexpr int64_t kDeltaBytesAhead = 2048;
constexpr int64_t kMostRowsAhead = 32;
constexpr int64_t kMostPrefetchedBytes = 2048;  // of one row; the rest of a long row the hardware guesses

ECRM_INLINE void fetch(const uint8_t* parity, const uint8_t* delta, int64_t width) {
  const int64_t bytes = width < kMostPrefetchedBytes ? width : kMostPrefetchedBytes;
  for (int64_t at = 0; at < bytes; at += 64) {
    __builtin_prefetch(parity + at, 1, 3);
    __builtin_prefetch(delta + kDeltaBytesAhead + at, 0, 3);
  }
  __builtin_prefetch(parity + bytes - 1, 1, 3);  // a row that is not aligned ends in one more cache line
}

ECRM_INLINE Lane sum(Lane parity, Lane delta, bool multiplied, const Factor& f) {
  return parity ^ (multiplied ? lane_times(delta, f) : delta);
}

// parity ^= coefficient * delta for one row. Four lanes at a time without a branch: what is left to do for a width of
// 256 is then the same for every row, and the processor guesses every branch right.
ECRM_INLINE void add_row(uint8_t* parity, const uint8_t* delta, int64_t width, bool multiplied, const Factor& f) {
  int64_t at = 0;
  for (; at + 4 * kLane <= width; at += 4 * kLane) {
    Lane sums[4];
    for (int lane = 0; lane < 4; ++lane) {
      sums[lane] = sum(lane_load(parity + at + lane * kLane), lane_load(delta + at + lane * kLane), multiplied, f);
    }
    for (int lane = 0; lane < 4; ++lane) lane_store(parity + at + lane * kLane, sums[lane]);
  }
  for (; at + kLane <= width; at += kLane) {
    lane_store(parity + at, sum(lane_load(parity + at), lane_load(delta + at), multiplied, f));
  }
  if (at < width) {
    const int64_t rest = width - at;
    const Lane tail = sum(lane_load_part(parity + at, rest), lane_load_part(delta + at, rest), multiplied, f);
    lane_store_part(parity + at, tail, rest);
  }
}

// coefficient_step is 1 for a coefficient per row, 0 for one coefficient for all.
static void apply(uint8_t* parity, int64_t parity_stride, const int64_t* rows, int64_t n, const uint8_t* coefficients,
                  int64_t coefficient_step, const uint8_t* delta, int64_t delta_stride, int64_t width) {
  int64_t ahead = kParityBytesAhead / width;
  ahead = ahead < 1 ? 1 : ahead > kMostRowsAhead ? kMostRowsAhead : ahead;
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t* source = delta + i * delta_stride;
    const int64_t next = i + ahead < n ? i + ahead : n - 1;
    fetch(parity + rows[next] * parity_stride, source, width);
    uint8_t* target = parity + rows[i] * parity_stride;
    const uint8_t coefficient = coefficients[i * coefficient_step];
    if (coefficient == 1) {
      add_row(target, source, width, false, Factor{});
    } else if (coefficient != 0) {
      add_row(target, source, width, true, factor(coefficient));
    }
  }
}
