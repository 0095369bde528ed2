// Dot products of every pair of rows of a sample, and back; see README.md. Strides count floats.
// `room` has space for ecrm_dot_interaction_room(features, dimension) floats, all zero. `seen`,
// zeros at first, becomes 1 for the written rows of `sums`.
#define ECRM_LOOPS "dot_interaction/loops.h"
#include "each_set.h"

ECRM_ENTRY int64_t ecrm_dot_interaction_room(int64_t features, int64_t dimension) {
  const int64_t padded = (dimension + 15) / 16 * 16;
  return (features + 2) * padded + (features + 1) * (features + 1);
}

ECRM_ENTRY void ecrm_dot_interaction(float* out, int64_t out_stride, const float* dense,
                                     int64_t dense_stride, const float* values,
                                     int64_t value_stride, const int64_t* places, int64_t batch,
                                     int64_t features, int64_t dimension, float* room) {
  ECRM_PICK(forward)(out, out_stride, dense, dense_stride, values, value_stride, places, batch,
                     features, dimension, room);
}

ECRM_ENTRY void ecrm_dot_interaction_backward(float* dense_gradients, float* sums,
                                              int64_t sum_stride, uint8_t* seen,
                                              const float* gradients, int64_t stride,
                                              const float* dense, int64_t dense_stride,
                                              const float* values, int64_t value_stride,
                                              const int64_t* places, int64_t batch,
                                              int64_t features, int64_t dimension, float* room) {
  ECRM_PICK(backward)
  (dense_gradients, sums, sum_stride, seen, gradients, stride, dense, dense_stride, values,
   value_stride, places, batch, features, dimension, room);
}
