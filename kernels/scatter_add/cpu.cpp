// out[index[i]] += values[i], in the order of index; see README.md. Strides and widths count
// floats.
#define ECRM_LOOPS "scatter_add/loops.h"
#include "each_set.h"

ECRM_ENTRY void ecrm_scatter_add(float* out, int64_t out_stride, int64_t width,
                                 const int64_t* index, int64_t n, const float* values,
                                 int64_t value_stride, const int64_t* picked, int64_t dimension,
                                 uint8_t* seen) {
  ECRM_PICK(add)(out, out_stride, width, index, n, values, value_stride, picked, dimension, seen);
}
