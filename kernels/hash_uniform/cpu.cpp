// The initial value of (row, column) as a hash of (seed, table, row, column); see README.md.
#define ECRM_LOOPS "hash_uniform/loops.h"
#include "each_set.h"

ECRM_ENTRY void ecrm_hash_uniform(uint64_t seed, const uint64_t* tables, int64_t table_step,
                                  const int64_t* rows, int64_t n, int64_t dimension,
                                  const float* bounds, int64_t bound_step, float* out) {
  ECRM_PICK(fill)(seed, tables, table_step, rows, n, dimension, bounds, bound_step, out);
}
