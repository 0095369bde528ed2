// parity[rows[i]] ^= coefficients[i] * delta[i] over GF(2^8); see README.md. The caller has checked
// the arguments.
#define ECRM_LOOPS "parity_apply/loops.h"
#include "each_set.h"

ECRM_ENTRY void ecrm_parity_apply(uint8_t* parity, int64_t parity_stride, const int64_t* rows,
                                  int64_t n, const uint8_t* coefficients, int64_t coefficient_step,
                                  const uint8_t* delta, int64_t delta_stride, int64_t width) {
  ECRM_PICK(apply)(parity, parity_stride, rows, n, coefficients, coefficient_step, delta,
                   delta_stride, width);
}
