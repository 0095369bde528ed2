// out[r] = (sum of values[picked[u]] over the uses u of row r, in order, each times its weight) /
// divisor, and a test that all results are finite; see README.md. Strides count floats.
#include "native.h"

namespace ecrm {

// The arguments, as in __init__.py. With a null `picked` the value of use u is values[u]. `weights`
// may be null.
struct Sums {
  float* out;
  int64_t out_stride, rows, dimension;
  const int32_t* starts;
  const int32_t* order;
  const float* values;
  int64_t value_stride;
  const int64_t* picked;
  const float* weights;
  float divisor;
  int32_t bfloat16;
};

// From this size on, sums go to memory past the caches: the reader is a different process.
constexpr int64_t kStreamedBytes = 1 << 20;

ECRM_INLINE const float* value_of(const Sums& s, int64_t use) {
  return s.values + (s.picked == nullptr ? use : s.picked[use]) * s.value_stride;
}

}  // namespace ecrm

#define ECRM_LOOPS "segment_sum/loops.h"
#include "each_set.h"

ECRM_ENTRY int ecrm_segment_sum(const ecrm::Sums* sums) { return ECRM_PICK(segment_sum)(*sums); }

// Whether `starts` begins at 0, ascends and ends at n, and all places of `order` lie in 0..n-1.
ECRM_ENTRY int ecrm_uses_fit(const int32_t* starts, int64_t rows, const int32_t* order, int64_t n) {
  bool fits = starts[0] == 0 && starts[rows] == n;
  for (int64_t row = 0; row < rows; ++row) fits &= starts[row] <= starts[row + 1];
  for (int64_t use = 0; use < n; ++use) fits &= static_cast<uint32_t>(order[use]) < n;
  return fits;
}
