// The merging of deltas into a log (README.md), for operations that do it in the same pass.
#pragma once

#include "../native.h"

// `records` of `width` bytes, record_stride bytes apart, of n rows, none twice; `rows_there` >= n:
// how many row numbers there are to look ahead at. Returns how many rows the log has then, of
// `count` before.
ECRM_ENTRY int64_t ecrm_merge_records(int32_t* places, const int64_t* rows, int64_t n,
                                      int64_t rows_there, const uint8_t* records,
                                      int64_t record_stride, int64_t width, int64_t* log_rows,
                                      uint8_t* log, int64_t count);
