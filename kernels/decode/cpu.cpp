// out[w, i] = XOR over unit of matrix[w, unit] * units[unit, i] over GF(2^8); see README.md.
#define ECRM_LOOPS "decode/loops.h"
#include "each_set.h"

constexpr int64_t kMostUnits = 255;

// `units` has k base pointers, `outputs` has `wanted` base pointers; k and wanted are at most 255.
// Units and outputs have n rows with a stride in bytes. The caller has checked the arguments;
// outputs overlap no memory.
ECRM_ENTRY void ecrm_decode(const uint8_t* const* units, const int64_t* unit_strides, int64_t k,
                            const uint8_t* matrix, int64_t wanted, uint8_t* const* outputs,
                            const int64_t* output_strides, int64_t n, int64_t width) {
  const auto decode_row = ECRM_PICK(decode_row);
  const uint8_t* sources[kMostUnits];
  uint8_t* targets[kMostUnits];
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t unit = 0; unit < k; ++unit) sources[unit] = units[unit] + i * unit_strides[unit];
    for (int64_t w = 0; w < wanted; ++w) targets[w] = outputs[w] + i * output_strides[w];
    decode_row(sources, k, matrix, wanted, targets, width);
  }
}
