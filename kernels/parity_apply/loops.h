// Compiled once per instruction set by each_set.h.

// Distances of prefetching. Scattered parity rows, which no hardware prefetcher can guess, are
// fetched 8 KiB of rows ahead. Deltas, one after the other in memory, are fetched 2 KiB ahead.
// Measured on Zen 5 with rows of 256 bytes.
constexpr int64_t kParityBytesAhead = 8192;
constexpr int64_t kDeltaBytesAhead = 2048;
constexpr int64_t kMostRowsAhead = 32;
// most blocks to fetch of a row; the hardware guesses the rest of a long row
constexpr int64_t kMostPrefetchedBlocks = 32;

// Blocks of 64 bytes: an aligned block is one cache line.
constexpr int64_t kBlock = 64;
constexpr int kLanes = kBlock / kLane;
struct Block {
  Lane lane[kLanes];
};

ECRM_INLINE Block block_sum(const uint8_t* parity, const uint8_t* delta, bool multiplied,
                            const Factor& f) {
  Block result;
  for (int i = 0; i < kLanes; ++i) {
    const Lane change = lane_load(delta + i * kLane);
    result.lane[i] = lane_load(parity + i * kLane) ^ (multiplied ? lane_times(change, f) : change);
  }
  return result;
}

ECRM_INLINE void block_store(uint8_t* to, const Block& block) {
  for (int i = 0; i < kLanes; ++i) lane_store(to + i * kLane, block.lane[i]);
}

// parity ^= coefficient * delta for a row of at least a block. If the width is not a multiple of
// blocks, the last block overlaps the block before. The last block is computed before the first
// write, and written last.
ECRM_INLINE void add_row(uint8_t* parity, const uint8_t* delta, int64_t blocks, int64_t width,
                         bool multiplied, const Factor& f) {
  const int64_t last = width - kBlock;
  const Block tail = block_sum(parity + last, delta + last, multiplied, f);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t at = block * kBlock;
    block_store(parity + at, block_sum(parity + at, delta + at, multiplied, f));
  }
  if (blocks * kBlock < width) block_store(parity + last, tail);
}

// parity ^= coefficient * delta for a row shorter than a block.
ECRM_INLINE void add_short_row(uint8_t* parity, const uint8_t* delta, int64_t width,
                               bool multiplied, const Factor& f) {
  for (int64_t at = 0; at < width; at += kLane) {
    const int64_t rest = width - at < kLane ? width - at : kLane;
    const bool whole = rest == kLane;
    const Lane change = whole ? lane_load(delta + at) : lane_load_part(delta + at, rest);
    const Lane old = whole ? lane_load(parity + at) : lane_load_part(parity + at, rest);
    const Lane fresh = old ^ (multiplied ? lane_times(change, f) : change);
    if (whole) {
      lane_store(parity + at, fresh);
    } else {
      lane_store_part(parity + at, fresh, rest);
    }
  }
}

ECRM_INLINE void fetch(const uint8_t* parity, const uint8_t* delta, int64_t blocks, int64_t width) {
  const int64_t most = blocks < kMostPrefetchedBlocks ? blocks : kMostPrefetchedBlocks;
  for (int64_t block = 0; block < most; ++block) {
    __builtin_prefetch(parity + block * kBlock, 1, 3);
    __builtin_prefetch(delta + kDeltaBytesAhead + block * kBlock, 0, 3);
  }
  if (most * kBlock < width) __builtin_prefetch(parity + most * kBlock, 1, 3);
  // an unaligned row has one line more
  __builtin_prefetch(parity + (most < blocks ? most * kBlock : width) - 1, 1, 3);
}

// coefficient_step is 1 for a coefficient per row, 0 for a coefficient shared by all rows.
ECRM_INLINE void apply_blocks(int64_t blocks, uint8_t* parity, int64_t parity_stride,
                              const int64_t* rows, int64_t n, const uint8_t* coefficients,
                              int64_t coefficient_step, const uint8_t* delta, int64_t delta_stride,
                              int64_t width) {
  int64_t ahead = kParityBytesAhead / width;
  ahead = ahead < 1 ? 1 : ahead > kMostRowsAhead ? kMostRowsAhead : ahead;
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t* source = delta + i * delta_stride;
    const int64_t next = i + ahead < n ? i + ahead : n - 1;
    fetch(parity + rows[next] * parity_stride, source, blocks, width);
    uint8_t* target = parity + rows[i] * parity_stride;
    const uint8_t coefficient = coefficients[i * coefficient_step];
    if (coefficient == 0) continue;
    if (blocks == 0) {
      add_short_row(target, source, width, true, factor(coefficient));
    } else if (coefficient == 1) {
      add_row(target, source, blocks, width, false, Factor{});
    } else {
      add_row(target, source, blocks, width, true, factor(coefficient));
    }
  }
}

// Rows of up to 16 whole blocks are compiled with unrolled loops: in short inner loops, wrongly
// guessed branches cost more than the arithmetic.
static void apply(uint8_t* parity, int64_t parity_stride, const int64_t* rows, int64_t n,
                  const uint8_t* coefficients, int64_t coefficient_step, const uint8_t* delta,
                  int64_t delta_stride, int64_t width) {
#define ECRM_APPLY(blocks)                                                                    \
  apply_blocks(blocks, parity, parity_stride, rows, n, coefficients, coefficient_step, delta, \
               delta_stride, width)
  switch (width / kBlock) {
    case 0: return ECRM_APPLY(0);
    case 1: return ECRM_APPLY(1);
    case 2: return ECRM_APPLY(2);
    case 3: return ECRM_APPLY(3);
    case 4: return ECRM_APPLY(4);
    case 5: return ECRM_APPLY(5);
    case 6: return ECRM_APPLY(6);
    case 7: return ECRM_APPLY(7);
    case 8: return ECRM_APPLY(8);
    case 9: return ECRM_APPLY(9);
    case 10: return ECRM_APPLY(10);
    case 11: return ECRM_APPLY(11);
    case 12: return ECRM_APPLY(12);
    case 13: return ECRM_APPLY(13);
    case 14: return ECRM_APPLY(14);
    case 15: return ECRM_APPLY(15);
    case 16: return ECRM_APPLY(16);
    default: return ECRM_APPLY(width / kBlock);
  }
#undef ECRM_APPLY
}
