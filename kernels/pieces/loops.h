// Compiled once per instruction set by each_set.h.
#include "records/copy_bytes.h"

constexpr int64_t kRowsAhead = 24;

static void copy(uint8_t* out, const Piece* pieces, int64_t n) {
  for (const Piece* piece = pieces; piece < pieces + n; ++piece) {
    const int64_t* const picked = piece->picked;
    const int64_t* const to = piece->to;
    const int64_t width = piece->width, last = piece->count - 1;
    uint8_t* const target = out + piece->at;
    if (width == 0) continue;
    if (picked == nullptr && to == nullptr) {
      memcpy(target, piece->source, static_cast<size_t>(width));
      continue;
    }
    for (int64_t i = 0; i <= last; ++i) {
      const int64_t ahead = i + kRowsAhead < last ? i + kRowsAhead : last;
      if (picked != nullptr) fetch_row<0>(piece->source + picked[ahead] * width, width);
      if (to != nullptr) fetch_row(target + to[ahead] * width, width);
      copy_bytes(target + (to == nullptr ? i : to[i]) * width,
                 piece->source + (picked == nullptr ? i : picked[i]) * width, width);
    }
  }
}
