// Records (a row's bytes followed by its optimizer state's) gathered, scattered, XORed and merged;
// see README.md.
#include "native.h"
#include "records/merge.h"

namespace ecrm {

struct Parts {
  uint8_t* const* base;
  const int64_t* stride;
  const int64_t* width;  // at least 1 each
  int64_t count;
};

}  // namespace ecrm

#define ECRM_LOOPS "records/loops.h"
#include "each_set.h"

ECRM_ENTRY int64_t ecrm_merge_records(int32_t* places, const int64_t* rows, int64_t n,
                                      int64_t rows_there, const uint8_t* records,
                                      int64_t record_stride, int64_t width, int64_t* log_rows,
                                      uint8_t* log, int64_t count) {
  return ECRM_PICK(merge)(places, rows, n, rows_there, records, record_stride, width, log_rows, log,
                          count);
}

ECRM_ENTRY void ecrm_gather_records(uint8_t* const* bases, const int64_t* strides,
                                    const int64_t* widths, int64_t count, const int64_t* rows,
                                    int64_t n, uint8_t* records, int64_t record_stride) {
  ECRM_PICK(gather)({bases, strides, widths, count}, rows, n, records, record_stride);
}

ECRM_ENTRY void ecrm_scatter_records(uint8_t* const* bases, const int64_t* strides,
                                     const int64_t* widths, int64_t count, const int64_t* rows,
                                     int64_t n, const uint8_t* records, int64_t record_stride,
                                     const int64_t* picked) {
  ECRM_PICK(scatter)({bases, strides, widths, count}, rows, n, records, record_stride, picked);
}

ECRM_ENTRY void ecrm_xor_records(uint8_t* const* bases, const int64_t* strides,
                                 const int64_t* widths, int64_t count, const int64_t* rows,
                                 int64_t n, const uint8_t* records, int64_t record_stride) {
  ECRM_PICK(exclusive_or)({bases, strides, widths, count}, rows, n, records, record_stride);
}
