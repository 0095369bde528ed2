// out[i] = values[i] / divisor, and a test that all quotients are finite; see README.md.
#define ECRM_LOOPS "divide/loops.h"
#include "each_set.h"

ECRM_ENTRY int ecrm_divide(float* out, const float* values, int64_t n, float divisor) {
  return ECRM_PICK(divide)(out, values, n, divisor);
}
