// Instruction sets (supported by the machine, in use) and the tables of GF(2^8).
#include "native.h"

namespace ecrm {

FieldTables field;
int instruction_set;

static unsigned times(unsigned a, unsigned b) {
  unsigned product = 0;
  for (int bit = 0; bit < 8; ++bit) {
    if (b >> bit & 1) product ^= a << bit;
  }
  for (int bit = 14; bit >= 8; --bit) {
    if (product >> bit & 1) product ^= 0x11du << (bit - 8);
  }
  return product;
}

// vgf2p8affineqb computes output bit i as the parity of (matrix byte 7 - i AND input), so row i of
// the matrix holds, for each input bit j, bit i of c * 2^j.
static uint64_t affine_matrix(unsigned c) {
  uint64_t matrix = 0;
  for (int i = 0; i < 8; ++i) {
    uint64_t row = 0;
    for (int j = 0; j < 8; ++j) row |= static_cast<uint64_t>(times(c, 1u << j) >> i & 1) << j;
    matrix |= row << (8 * (7 - i));
  }
  return matrix;
}

static int best_supported() {
#if defined(ECRM_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool gfni = avx512 && __builtin_cpu_supports("gfni");
  return gfni ? kGfni : avx512 ? kAvx512 : avx2 ? kAvx2 : kPortable;
#else
  return kPortable;
#endif
}

static const struct Load {
  Load() {
    for (unsigned c = 0; c < 256; ++c) {
      for (unsigned v = 0; v < 16; ++v) {
        field.low[c][v] = static_cast<uint8_t>(times(c, v));
        field.high[c][v] = static_cast<uint8_t>(times(c, v << 4));
      }
      field.affine[c] = affine_matrix(c);
    }
    instruction_set = best_supported();
  }
} load;

}  // namespace ecrm

ECRM_ENTRY int ecrm_best_instruction_set() { return ecrm::best_supported(); }

ECRM_ENTRY int ecrm_instruction_set() { return ecrm::instruction_set; }

// Returns 0. If the machine does not support the set, returns -1 and changes nothing.
ECRM_ENTRY int ecrm_use_instruction_set(int set) {
  if (set < 0 || set > ecrm::best_supported()) return -1;
  ecrm::instruction_set = set;
  return 0;
}

// The position of the first row number outside 0..limit-1, or -1. limit is at least 0.
ECRM_ENTRY int64_t ecrm_first_outside(const int64_t* rows, int64_t n, int64_t limit) {
  const uint64_t largest = static_cast<uint64_t>(limit) - 1;
  uint64_t outside = 0;  // the top bit is set if a row is negative, or larger than the largest
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t row = static_cast<uint64_t>(rows[i]);
    outside |= row | (largest - row);
  }
  if (outside >> 63 == 0) return -1;
  for (int64_t i = 0; i < n; ++i) {
    if (static_cast<uint64_t>(rows[i]) >= static_cast<uint64_t>(limit)) return i;
  }
  return -1;
}
