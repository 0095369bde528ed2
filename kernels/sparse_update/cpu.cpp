// The sparse optimizers, in place, with the delta of each touched record written in the same pass; see README.md.
#include "native.h"

namespace ecrm {

// Numbers shared with __init__.py.
enum WeightType { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };
enum Optimizer { kSgd = 0, kRowwiseAdagrad = 1, kAdagrad = 2, kAdam = 3 };

struct Hyper {
  float learning_rate, eps, beta1, beta2, one_minus_beta1, one_minus_beta2, correction1, correction2;
};

// Passed from Python by pointer: the field order and types are those of `_Update` in __init__.py. Strides count bytes,
// but for gradient_stride, which counts floats.
struct Update {
  uint8_t* weights;
  int64_t weights_stride;
  uint8_t* state[2];
  int64_t state_stride[2];
  const int64_t* rows;
  const float* gradients;
  int64_t gradient_stride;
  uint8_t* delta;  // null: no delta wanted
  int64_t delta_stride;
  int64_t n;
  int64_t dimension;
  int32_t type;
  int32_t optimizer;
  Hyper hyper;
};

}  // namespace ecrm

#define ECRM_LOOPS "sparse_update/loops.h"
#include "each_set.h"

ECRM_ENTRY void ecrm_sparse_update(const ecrm::Update* update) { ECRM_PICK(update)(*update); }
