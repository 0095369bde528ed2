// Compiled once per instruction set by each_set.h.

static uint64_t mixed(uint64_t number) {
  number = (number ^ number >> 33) * 0xff51afd7ed558ccdu;
  number = (number ^ number >> 33) * 0xc4ceb9fe1a85ec53u;
  return number ^ number >> 33;
}

// keys: [lanes][2 * half]. The compiler turns the plain loops into vectors.
static void row_digest(uint64_t* sums, const uint32_t* rows, const uint64_t* numbers, int64_t n,
                       int64_t words, const uint32_t* keys, const uint64_t* factors) {
  constexpr int kLanes = 4;
  const int64_t half = (words + 1) / 2, pairs = words / 2;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t* row = rows + i * words;
    const uint64_t number = mixed(numbers[i]);
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint32_t *low = keys + 2 * half * lane, *high = low + half;
      uint64_t products = 0;
      for (int64_t j = 0; j < pairs; ++j) {
        products += static_cast<uint64_t>(row[j] + low[j]) *
                    static_cast<uint64_t>(static_cast<uint32_t>(row[half + j] + high[j]));
      }
      if (pairs < half) {  // an odd number of words: the last pair has a zero
        products += static_cast<uint64_t>(static_cast<uint32_t>(row[pairs] + low[pairs])) *
                    high[pairs];
      }
      sums[lane] += mixed(products + number * factors[lane]);
    }
  }
}
