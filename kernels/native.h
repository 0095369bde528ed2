// Declarations shared by all operations: the C entry macro, the instruction sets, the tables of
// GF(2^8).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#define ECRM_X86 1
#endif

#define ECRM_ENTRY extern "C" __attribute__((visibility("default")))
#define ECRM_INLINE static inline __attribute__((always_inline, unused))

namespace ecrm {

// Numbers shared with native.py. The largest number supported by the machine is preferred.
enum InstructionSet { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kGfni = 3, kInstructionSets = 4 };

// The set in use: the machine's best set, or the set forced by ecrm_use_instruction_set.
extern int instruction_set;

// Tables of GF(2^8) modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11d), filled when the library is loaded.
struct FieldTables {
  uint8_t low[256][16];   // low[c][v]  = c * v          for the low four bits of a byte
  uint8_t high[256][16];  // high[c][v] = c * (v << 4)   for the high four bits
  uint64_t affine[256];   // multiplication by c as an 8 x 8 bit matrix for vgf2p8affineqb
};
extern FieldTables field;

// Whether all `rows` lie in 0..limit-1.
ECRM_INLINE bool all_below(const int64_t* rows, int64_t n, int64_t limit) {
  uint64_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t row = static_cast<uint64_t>(rows[i]);
    largest = row > largest ? row : largest;
  }
  return n == 0 || largest < static_cast<uint64_t>(limit);
}

// Prefetches a scattered row, to write the row soon (kWritten) or only to read. Takes four cache
// lines at a time without a branch: in short loops, wrongly guessed branches cost more than the
// work. Of a long row only the beginning is fetched; the hardware fetches the rest by itself. A
// template, because the arguments of __builtin_prefetch must be constants. The template is outside
// of the files compiled once per set, so GCC cannot forget the target.
template <int kWritten = 1>
ECRM_INLINE void fetch_row(const uint8_t* row, int64_t bytes) {
  if (bytes > 2048) bytes = 2048;
  int64_t at = 0;
  for (; at + 256 <= bytes; at += 256) {
    for (int line = 0; line < 4; ++line) __builtin_prefetch(row + at + 64 * line, kWritten, 3);
  }
#pragma GCC unroll 1
  for (; at < bytes; at += 64) __builtin_prefetch(row + at, kWritten, 3);
  const bool one_more_line =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) % 64) + (bytes - 1) % 64 >= 64;
  if (one_more_line) __builtin_prefetch(row + bytes - 1, kWritten, 3);
}

// Picks the loop of the set in use, from a table with an entry per set.
#if defined(ECRM_X86)
#define ECRM_PICK(loop)                                                              \
  ((decltype(&ecrm::portable::loop) const[]){ecrm::portable::loop, ecrm::avx2::loop, \
                                             ecrm::avx512::loop,                     \
                                             ecrm::gfni::loop}[ecrm::instruction_set])
#else
#define ECRM_PICK(loop) (&ecrm::portable::loop)
#endif

}  // namespace ecrm
