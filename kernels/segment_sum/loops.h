// Compiled once per instruction set by each_set.h.

constexpr int64_t kUsesAhead = 8;
constexpr int64_t kMostLanes = 8;

// The largest magnitude until now, by lane. Bits of magnitudes are ordered as the magnitudes, with
// NaN above infinity.
typedef int32_t Magnitudes __attribute__((vector_size(4 * kFloats)));
constexpr int32_t kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

// Sums `lanes` lanes of every row, from column `first` on: zeros plus the values of the row's uses
// in order, or times their weights, divided, rounded to bfloat16 if wanted, and written once.
// `lanes`, `weighted` and `bfloat16` are constants, so the sums stay in registers.
ECRM_INLINE Magnitudes sum_lanes(const Sums& s, int64_t first, int lanes, bool streamed,
                                 bool weighted, bool bfloat16, Magnitudes largest) {
  const int32_t last = s.starts[s.rows] - 1;
  for (int64_t row = 0; row < s.rows; ++row) {
    Floats sum[kMostLanes] = {};
    for (int32_t use = s.starts[row]; use < s.starts[row + 1]; ++use) {
      const int64_t ahead = s.order[use + kUsesAhead < last ? use + kUsesAhead : last];
      fetch_row<0>(reinterpret_cast<const uint8_t*>(value_of(s, ahead) + first),
                   4 * kFloats * lanes);
      const float* from = value_of(s, s.order[use]) + first;
      for (int lane = 0; lane < lanes; ++lane) {
        Floats value;
        memcpy(&value, from + lane * kFloats, sizeof value);
        sum[lane] += weighted ? value * s.weights[s.order[use]] : value;
      }
    }
    float* to = s.out + row * s.out_stride + first;
    for (int lane = 0; lane < lanes; ++lane) {
      Floats quotient = sum[lane] / s.divisor;
      if (bfloat16) quotient = floats_to_bfloat16(quotient);
      const Magnitudes bits = (Magnitudes)quotient & kMagnitude;
      largest = bits > largest ? bits : largest;
      if (streamed) {
        floats_stream(to + lane * kFloats, quotient);
      } else {
        memcpy(to + lane * kFloats, &quotient, sizeof quotient);
      }
    }
  }
  return largest;
}

// Sums the columns from `first` on, fewer than a lane.
static bool sum_rest(const Sums& s, int64_t first) {
  int32_t largest = 0;
  for (int64_t row = 0; row < s.rows; ++row) {
    float* to = s.out + row * s.out_stride;
    for (int64_t d = first; d < s.dimension; ++d) {
      float sum = 0;
      for (int32_t use = s.starts[row]; use < s.starts[row + 1]; ++use) {
        const float value = value_of(s, s.order[use])[d];
        sum += s.weights == nullptr ? value : value * s.weights[s.order[use]];
      }
      float quotient = sum / s.divisor;
      if (s.bfloat16 != 0) quotient = float_to_bfloat16(quotient);
      int32_t bits;
      memcpy(&bits, &quotient, sizeof bits);
      bits &= kMagnitude;
      largest = bits > largest ? bits : largest;
      to[d] = quotient;
    }
  }
  return largest < kInfinity;
}

ECRM_INLINE bool sum_columns(const Sums& s, bool streamed, bool weighted, bool bfloat16) {
  Magnitudes largest = {};
  int64_t first = 0;
  for (; first + kMostLanes * kFloats <= s.dimension; first += kMostLanes * kFloats)
    largest = sum_lanes(s, first, 8, streamed, weighted, bfloat16, largest);
  if (first + 4 * kFloats <= s.dimension) {
    largest = sum_lanes(s, first, 4, streamed, weighted, bfloat16, largest);
    first += 4 * kFloats;
  }
  if (first + 2 * kFloats <= s.dimension) {
    largest = sum_lanes(s, first, 2, streamed, weighted, bfloat16, largest);
    first += 2 * kFloats;
  }
  if (first + kFloats <= s.dimension) {
    largest = sum_lanes(s, first, 1, streamed, weighted, bfloat16, largest);
    first += kFloats;
  }
  bool finite = first == s.dimension || sum_rest(s, first);
  for (int64_t lane = 0; lane < kFloats; ++lane) finite &= largest[lane] < kInfinity;
  return finite;
}

ECRM_INLINE bool sum_as(const Sums& s, bool streamed) {
  if (s.bfloat16 != 0)
    return s.weights != nullptr ? sum_columns(s, streamed, true, true)
                                : sum_columns(s, streamed, false, true);
  return s.weights != nullptr ? sum_columns(s, streamed, true, false)
                              : sum_columns(s, streamed, false, false);
}

// Returns whether all quotients are finite.
static bool segment_sum(const Sums& given) {
  const Sums s = given;  // a copy: the compiler knows that writes to rows do not change `s`
  const int64_t bytes = 4 * kFloats;
  const bool aligned = reinterpret_cast<uintptr_t>(s.out) % bytes == 0 &&
                       s.out_stride * 4 % bytes == 0;
  if (!aligned || s.rows * s.dimension * 4 < kStreamedBytes) return sum_as(s, false);
  const bool finite = sum_as(s, true);
  stream_end();
  return finite;
}
