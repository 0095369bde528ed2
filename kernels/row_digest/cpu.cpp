// The sum of the hashes of numbered rows; see README.md.
#define ECRM_LOOPS "row_digest/loops.h"
#include "each_set.h"

ECRM_ENTRY void ecrm_row_digest(uint64_t* sums, const uint32_t* rows, const uint64_t* numbers,
                                int64_t n, int64_t words, const uint32_t* keys,
                                const uint64_t* factors) {
  ECRM_PICK(row_digest)(sums, rows, numbers, n, words, keys, factors);
}
