// Compiled once per instruction set by each_set.h.

constexpr int64_t kUsesAhead = 8;

// Sums `lanes` lanes of a bag, from column `first` on: zeros plus the rows of the bag's uses in
// order, or fused with the weights of the uses, divided for a mean. With `rounds`, rows and results
// are rounded to bfloat16. `lanes`, `weighted` and `rounds` are constants, so the sums stay in
// registers.
ECRM_INLINE void sum_lanes(const Bags& b, const int64_t* places, const float* weights, int64_t uses,
                           int64_t first, int lanes, bool weighted, bool rounds, float* to) {
  Floats sum[8] = {};
  for (int64_t use = 0; use < uses; ++use) {
    const float* from = b.addresses[places[use]] + first;
    for (int lane = 0; lane < lanes; ++lane) {
      Floats value;
      memcpy(&value, from + lane * kFloats, sizeof value);
      if (rounds) value = floats_to_bfloat16(value);
      sum[lane] = weighted ? floats_fused(weights[use] - Floats{}, value, sum[lane])
                           : sum[lane] + value;
    }
  }
  if (b.mean != 0 && uses > 1) {
    for (int lane = 0; lane < lanes; ++lane) sum[lane] /= static_cast<float>(uses);
  }
  if (rounds) {
    for (int lane = 0; lane < lanes; ++lane) sum[lane] = floats_to_bfloat16(sum[lane]);
  }
  memcpy(to + first, sum, static_cast<size_t>(lanes) * sizeof sum[0]);
}

ECRM_INLINE float sum_one(const Bags& b, const int64_t* places, const float* weights, int64_t uses,
                          int64_t column, bool weighted, bool rounds) {
  float sum = 0;
  for (int64_t use = 0; use < uses; ++use) {
    float value = b.addresses[places[use]][column];
    if (rounds) value = float_to_bfloat16(value);
    sum = weighted ? __builtin_fmaf(weights[use], value, sum) : sum + value;
  }
  if (b.mean != 0 && uses > 1) sum /= static_cast<float>(uses);
  return rounds ? float_to_bfloat16(sum) : sum;
}

ECRM_INLINE void sum_bags(const Bags& b, bool weighted, bool rounds) {
  const int64_t* places = b.places;
  const int64_t* last = b.places + b.uses - 1;
  const float* weights = b.weights;
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
        sum_lanes(b, places, weights, uses, d, 8, weighted, rounds, to);
      if (d + 4 * kFloats <= b.dimension) {
        sum_lanes(b, places, weights, uses, d, 4, weighted, rounds, to);
        d += 4 * kFloats;
      }
      for (; d + kFloats <= b.dimension; d += kFloats)
        sum_lanes(b, places, weights, uses, d, 1, weighted, rounds, to);
      for (; d < b.dimension; ++d) to[d] = sum_one(b, places, weights, uses, d, weighted, rounds);
      places += uses;
      if (weighted) weights += uses;
    }
  }
}

static void bag_sum(const Bags& given) {
  const Bags b = given;  // a copy: the compiler knows that writes of sums do not change `b`
  if (b.bfloat16 != 0) {
    b.weights == nullptr ? sum_bags(b, false, true) : sum_bags(b, true, true);
  } else {
    b.weights == nullptr ? sum_bags(b, false, false) : sum_bags(b, true, false);
  }
}
