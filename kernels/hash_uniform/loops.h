// Compiled once per instruction set by each_set.h: plain loops that the compiler turns into
// vectors.

ECRM_INLINE uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

constexpr uint64_t kGamma = 0x9e3779b97f4a7c15ull;

// table_step and bound_step are 1 for a value per row, 0 for a value shared by all rows.
static void fill(uint64_t seed, const uint64_t* tables, int64_t table_step, const int64_t* rows,
                 int64_t n, int64_t dimension, const float* bounds, int64_t bound_step,
                 float* out) {
  const uint64_t seed_key = mix(seed + kGamma);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t table_key = mix(seed_key ^ tables[i * table_step]);
    const float bound = bounds[i * bound_step];
    const uint64_t row_key = mix(table_key + kGamma * (static_cast<uint64_t>(rows[i]) + 1));
    float* row = out + i * dimension;
    for (int64_t d = 0; d < dimension; ++d) {
      const uint64_t z = mix(row_key + kGamma * (static_cast<uint64_t>(d) + 1));
      const int32_t centred = static_cast<int32_t>(z >> 40) - (1 << 23);
      row[d] = static_cast<float>(centred) * 0x1p-23f * bound + 0.0f;
    }
  }
}
