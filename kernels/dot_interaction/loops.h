// Compiled once per instruction set by each_set.h.

// Sixteen floats, on every instruction set. The set decides only the number of registers. So the
// order of the additions, and every bit, is equal on all sets.
constexpr int64_t kSixteen = 16, kParts = kSixteen / kFloats;
struct Sixteen {
  Floats part[kParts];
};

ECRM_INLINE Sixteen load16(const float* from) {
  Sixteen value;
#pragma GCC unroll 8
  for (int p = 0; p < kParts; ++p) memcpy(&value.part[p], from + p * kFloats, sizeof(Floats));
  return value;
}
ECRM_INLINE void store16(float* to, const Sixteen& value) {
#pragma GCC unroll 8
  for (int p = 0; p < kParts; ++p) memcpy(to + p * kFloats, &value.part[p], sizeof(Floats));
}
ECRM_INLINE void add16(Sixteen& sum, const Sixteen& value) {
#pragma GCC unroll 8
  for (int p = 0; p < kParts; ++p) sum.part[p] += value.part[p];
}
ECRM_INLINE void add_product16(Sixteen& sum, const Sixteen& a, const Sixteen& b) {
#pragma GCC unroll 8
  for (int p = 0; p < kParts; ++p) sum.part[p] += a.part[p] * b.part[p];
}
ECRM_INLINE void add_multiple16(Sixteen& sum, float factor, const Sixteen& a) {
#pragma GCC unroll 8
  for (int p = 0; p < kParts; ++p) sum.part[p] += factor * a.part[p];
}

typedef float Four __attribute__((vector_size(16)));
typedef int32_t Choice __attribute__((vector_size(16)));

ECRM_INLINE Four load4(const float* from) {
  Four value;
  memcpy(&value, from, sizeof value);
  return value;
}

// The sums of the sixteen floats of four vectors: adds halves 8 floats apart, then 4, 2, 1.
ECRM_INLINE Four sums_of_four(const Sixteen* four) {
  Four left[4];
#pragma GCC unroll 8
  for (int t = 0; t < 4; ++t) {
    alignas(64) float x[kSixteen];
    store16(x, four[t]);
    left[t] = (load4(x) + load4(x + 8)) + (load4(x + 4) + load4(x + 12));
  }
  const Choice low2 = {0, 1, 4, 5}, high2 = {2, 3, 6, 7}, even = {0, 2, 4, 6}, odd = {1, 3, 5, 7};
  const Four ab =
      __builtin_shuffle(left[0], left[1], low2) + __builtin_shuffle(left[0], left[1], high2);
  const Four cd =
      __builtin_shuffle(left[2], left[3], low2) + __builtin_shuffle(left[2], left[3], high2);
  return __builtin_shuffle(ab, cd, even) + __builtin_shuffle(ab, cd, odd);
}

// Copies the rows of a sample to `room`, the dense row first. A row takes `padded` floats. The
// floats behind the end of a row are zero, and stay zero.
ECRM_INLINE void collect(float* room, int64_t padded, const float* dense, const float* values,
                         int64_t value_stride, const int64_t* places, int64_t features,
                         int64_t dimension) {
  memcpy(room, dense, 4 * static_cast<size_t>(dimension));
  for (int64_t f = 0; f < features; ++f) {
    memcpy(room + (f + 1) * padded, values + places[f] * value_stride,
           4 * static_cast<size_t>(dimension));
  }
}

ECRM_INLINE void fetch_rows(const float* rows, int64_t stride, const int64_t* places,
                            int64_t features, int64_t dimension) {
  for (int64_t f = 0; f < features; ++f)
    fetch_row(reinterpret_cast<const uint8_t*>(rows + places[f] * stride), 4 * dimension);
}

static void forward(float* out, int64_t out_stride, const float* dense, int64_t dense_stride,
                    const float* values, int64_t value_stride, const int64_t* places, int64_t batch,
                    int64_t features, int64_t dimension, float* room) {
  const int64_t padded = (dimension + kSixteen - 1) / kSixteen * kSixteen, rows = features + 1;
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t* mine = places + b * features;
    if (b + 1 < batch) fetch_rows(values, value_stride, mine + features, features, dimension);
    collect(room, padded, dense + b * dense_stride, values, value_stride, mine, features,
            dimension);
    float* to = out + b * out_stride;
    memcpy(to, room, 4 * static_cast<size_t>(dimension));
    to += dimension;
    for (int64_t i = 0; i + 1 < rows; ++i) {
      const float* left = room + i * padded;
      for (int64_t j = i + 1; j < rows; j += 4) {
        const float* right[4];  // with fewer than four rows left, the last row repeats
#pragma GCC unroll 8
        for (int t = 0; t < 4; ++t) right[t] = room + (j + t < rows ? j + t : rows - 1) * padded;
        Sixteen sums[4] = {};
        for (int64_t d = 0; d < padded; d += kSixteen) {
          const Sixteen x = load16(left + d);
#pragma GCC unroll 8
          for (int t = 0; t < 4; ++t) add_product16(sums[t], x, load16(right[t] + d));
        }
        const int64_t wanted = rows - j < 4 ? rows - j : 4;
        const Four found = sums_of_four(sums);
        if (wanted == 4) {
          memcpy(to, &found, sizeof found);
        } else {
          for (int64_t t = 0; t < wanted; ++t) to[t] = found[t];
        }
        to += wanted;
      }
    }
  }
}

// Computes `n` vectors of the gradient of row i, from column d on: `first`, or zero if null, plus
// factors[j] * row j for j = 0, 1, .. except i.
ECRM_INLINE void gradient_of(Sixteen* sums, const int n, const float* first, const float* room,
                             int64_t padded, const float* factors, int64_t i, int64_t rows,
                             int64_t d) {
#pragma GCC unroll 8
  for (int t = 0; t < n; ++t)
    sums[t] = first == nullptr ? Sixteen{} : load16(first + d + kSixteen * t);
  for (int64_t j = 0; j < i; ++j) {
#pragma GCC unroll 8
    for (int t = 0; t < n; ++t)
      add_multiple16(sums[t], factors[j], load16(room + j * padded + d + kSixteen * t));
  }
  for (int64_t j = i + 1; j < rows; ++j) {
#pragma GCC unroll 8
    for (int t = 0; t < n; ++t)
      add_multiple16(sums[t], factors[j], load16(room + j * padded + d + kSixteen * t));
  }
}

// Writes the first `count` of sixteen floats: stores, adds to zero (kBegins), or adds to memory.
enum Writes { kStores, kBegins, kAdds };
ECRM_INLINE void store_part(float* to, Sixteen value, int64_t count, Writes how) {
  if (count >= kSixteen) {
    if (how != kStores) add16(value, how == kAdds ? load16(to) : Sixteen{});
    store16(to, value);
    return;
  }
  float rest[kSixteen];
  store16(rest, value);
  for (int64_t d = 0; d < count; ++d)
    to[d] = how == kAdds ? to[d] + rest[d] : how == kBegins ? 0.0f + rest[d] : rest[d];
}

// `seen`, zeros at first, becomes 1 for the written rows of `sums`.
static void backward(float* dense_gradients, float* sums, int64_t sum_stride, uint8_t* seen,
                     const float* gradients, int64_t stride, const float* dense,
                     int64_t dense_stride, const float* values, int64_t value_stride,
                     const int64_t* places, int64_t batch, int64_t features, int64_t dimension,
                     float* room) {
  const int64_t padded = (dimension + kSixteen - 1) / kSixteen * kSixteen, rows = features + 1;
  // the given gradient of a sample's dense row, with zeros behind the end
  float* first = room + rows * padded;
  float* factors = first + padded;      // [rows, rows]: the gradients of the pairs' products
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t* mine = places + b * features;
    if (b + 1 < batch) {
      fetch_rows(values, value_stride, mine + features, features, dimension);
      fetch_rows(sums, sum_stride, mine + features, features, dimension);
    }
    collect(room, padded, dense + b * dense_stride, values, value_stride, mine, features,
            dimension);
    const float* from = gradients + b * stride;
    memcpy(first, from, 4 * static_cast<size_t>(dimension));
    from += dimension;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = i + 1; j < rows; ++j)
        factors[i * rows + j] = factors[j * rows + i] = *from++;
    }
    for (int64_t i = 0; i < rows; ++i) {
      float* to = i == 0 ? dense_gradients + b * dimension : sums + mine[i - 1] * sum_stride;
      const float* start = i == 0 ? first : nullptr;
      const Writes how = i == 0 ? kStores : seen[mine[i - 1]] ? kAdds : kBegins;
      if (i > 0) seen[mine[i - 1]] = 1;
      int64_t d = 0;
      for (; d + 4 * kSixteen <= padded; d += 4 * kSixteen) {
        Sixteen found[4];
        gradient_of(found, 4, start, room, padded, factors + i * rows, i, rows, d);
#pragma GCC unroll 8
        for (int t = 0; t < 4; ++t)
          store_part(to + d + kSixteen * t, found[t], dimension - d - kSixteen * t, how);
      }
      for (; d < padded; d += kSixteen) {
        Sixteen found[1];
        gradient_of(found, 1, start, room, padded, factors + i * rows, i, rows, d);
        store_part(to + d, found[0], dimension - d, how);
      }
    }
  }
}
