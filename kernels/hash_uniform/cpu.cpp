// The initial value of (row, column) as a hash of (seed, table, row, column); see README.md.
#define ECRM_LOOPS "hash_uniform/loops.h"
#include "each_set.h"

ECRM_ENTRY void ecrm_hash_uniform(uint64_t seed, uint64_t table, const int64_t* rows, int64_t n, int64_t dimension,
                                  float bound, float* out) {
  ECRM_PICK(fill)(seed, table, rows, n, dimension, bound, out);
}
