// Compiled once per instruction set by each_set.h.

constexpr int64_t kUsesAhead = 8;

// Sums `lanes` lanes of a bag, from column `first` on: zeros plus the rows of the bag's uses in
// order. `lanes` is a constant, so the sums stay in registers.
ECRM_INLINE void sum_lanes(const Bags& b, const int64_t* places, int64_t uses, int64_t first,
                           int lanes, float* to) {
  Floats sum[8] = {};
  for (int64_t use = 0; use < uses; ++use) {
    const float* from = b.addresses[places[use]] + first;
    for (int lane = 0; lane < lanes; ++lane) {
      Floats value;
      memcpy(&value, from + lane * kFloats, sizeof value);
      sum[lane] += value;
    }
  }
  memcpy(to + first, sum, static_cast<size_t>(lanes) * sizeof sum[0]);
}

static void bag_sum(const Bags& given) {
  const Bags b = given;  // a copy: the compiler knows that writes of sums do not change `b`
  const int64_t* places = b.places;
  const int64_t* last = b.places + b.uses - 1;
  for (int64_t feature = 0; feature < b.features; ++feature) {
    for (int64_t sample = 0; sample < b.samples; ++sample) {
      const int64_t uses = b.lengths[feature * b.samples + sample];
      float* to = b.out + (sample * b.features + feature) * b.dimension;
      for (int64_t use = 0; use < uses; ++use) {
        const int64_t* ahead = places + use + kUsesAhead < last ? places + use + kUsesAhead : last;
        fetch_row<0>(reinterpret_cast<const uint8_t*>(b.addresses[*ahead]), 4 * b.dimension);
      }
      int64_t d = 0;
      for (; d + 8 * kFloats <= b.dimension; d += 8 * kFloats)
        sum_lanes(b, places, uses, d, 8, to);
      if (d + 4 * kFloats <= b.dimension) {
        sum_lanes(b, places, uses, d, 4, to);
        d += 4 * kFloats;
      }
      for (; d + kFloats <= b.dimension; d += kFloats) sum_lanes(b, places, uses, d, 1, to);
      for (; d < b.dimension; ++d) {
        float sum = 0;
        for (int64_t use = 0; use < uses; ++use) sum += b.addresses[places[use]][d];
        to[d] = sum;
      }
      places += uses;
    }
  }
}
