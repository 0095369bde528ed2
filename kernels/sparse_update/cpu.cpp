// The sparse optimizers, in place, with the delta of each touched record written in the same pass;
// see README.md.
#include "native.h"
#include "records/merge.h"

namespace ecrm {

// Numbers shared with __init__.py.
enum WeightType { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };
enum Optimizer { kSgd = 0, kRowwiseAdagrad = 1, kAdagrad = 2, kAdam = 3 };

struct Hyper {
  float learning_rate, eps, beta1, beta2, one_minus_beta1, one_minus_beta2, correction1,
      correction2, l2, keep;
};

// Passed from Python by pointer: the field order and types are those of `_Update` in __init__.py.
// Strides count bytes, but for gradient_stride, which counts floats.
struct Update {
  uint8_t* weights;
  int64_t weights_stride;
  uint8_t* state[2];
  int64_t state_stride[2];
  const int64_t* rows;
  const float* gradients;
  int64_t gradient_stride;
  uint8_t* delta;  // null: no delta
  int64_t delta_stride;
  int64_t n;
  int64_t rows_there;  // at least n: the number of readable row numbers, for prefetching
  int64_t dimension;
  int32_t type;
  int32_t optimizer;
  Hyper hyper;
  float* decayed;  // room for the gradient of one row with L2 decay; unused without L2 decay
};

}  // namespace ecrm

#define ECRM_LOOPS "sparse_update/loops.h"
#include "each_set.h"

ECRM_ENTRY void ecrm_sparse_update(const ecrm::Update* update) { ECRM_PICK(update)(*update); }

// Like ecrm_sparse_update, with the deltas merged into a log of records of delta_stride bytes
// (records/README.md). Returns the new number of rows in the log. Takes `at_a_time` rows at a time.
// `delta` has room for the deltas of so many rows, and stays in the second-level cache. The bytes
// of `delta` not written by the update are zeros.
ECRM_ENTRY int64_t ecrm_sparse_update_logged(const ecrm::Update* update, int64_t at_a_time,
                                             int32_t* places, int64_t* log_rows, uint8_t* log,
                                             int64_t count) {
  ecrm::Update some = *update;
  for (int64_t first = 0; first < update->n; first += at_a_time) {
    const int64_t rest = update->n - first;
    some.n = rest < at_a_time ? rest : at_a_time;
    some.rows = update->rows + first;
    some.rows_there = rest;
    some.gradients = update->gradients + first * update->gradient_stride;
    ecrm_sparse_update(&some);
    count = ecrm_merge_records(places, some.rows, some.n, rest, some.delta, some.delta_stride,
                               some.delta_stride, log_rows, log, count);
  }
  return count;
}
