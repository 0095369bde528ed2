// Compiled once per instruction set by each_set.h.
#include "records/copy_bytes.h"

constexpr int64_t kRowsAhead = 24;

static void write(int64_t* out, const Part* parts, const int64_t* starts, int64_t messages) {
  for (int64_t i = 0; i < messages; ++i) {
    const Part* const first = parts + starts[i];
    const Part* const last = parts + starts[i + 1];
    if (first == last) continue;
    *out++ = last - first;
    int64_t* heads = out + 2 * (last - first);
    for (const Part* part = first; part < last; ++part) {
      *out++ = part->code;
      *out++ = part->length;
      for (int64_t word = 0; word < part->words_count; ++word) *heads++ = part->words[word];
    }
    out = heads;
    for (const Part* part = first; part < last; ++part) {
      const int64_t width = part->width, count = part->count, bytes = width * count;
      if (bytes == 0) continue;
      uint8_t* const target = reinterpret_cast<uint8_t*>(out);
      out += in_words(bytes);
      if (bytes % 8 != 0) out[-1] = 0;  // the padding; the payload goes over it
      if (part->picked == nullptr) {
        memcpy(target, part->source, static_cast<size_t>(bytes));
        continue;
      }
      for (int64_t row = 0; row < count; ++row) {
        const int64_t ahead = row + kRowsAhead < count ? row + kRowsAhead : count - 1;
        fetch_row<0>(part->source + part->picked[ahead] * width, width);
        copy_bytes(target + row * width, part->source + part->picked[row] * width, width);
      }
    }
  }
}
