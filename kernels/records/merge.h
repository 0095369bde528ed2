// The merging of deltas into a log (README.md), for operations that compute deltas and merge them.
#pragma once

#include "../native.h"

// Merges the deltas `records` of n different rows. A record has `width` bytes; records are
// record_stride bytes apart. `rows_there` >= n is the number of readable row numbers, for
// prefetching. `count` is the number of rows in the log; returns the new number.
ECRM_ENTRY int64_t ecrm_merge_records(int32_t* places, const int64_t* rows, int64_t n,
                                      int64_t rows_there, const uint8_t* records,
                                      int64_t record_stride, int64_t width, int64_t* log_rows,
                                      uint8_t* log, int64_t count);
