// Many pieces of rows copied in one call; see README.md.
#include "native.h"

namespace ecrm {

// A piece, as in __init__.py. Rows have `width` bytes. Row i is row picked[i] of the source, and
// goes to row to[i] of the rows from byte `at` of the target on. A null pointer stands for 0, 1, ..
struct Piece {
  const uint8_t* source;
  int64_t height, width, at;
  const int64_t* picked;
  const int64_t* to;
  int64_t count;
};

static bool fits(const Piece& piece, int64_t bytes) {
  if (piece.at < 0 || piece.at > bytes) return false;
  if (piece.picked != nullptr && !all_below(piece.picked, piece.count, piece.height)) return false;
  if (piece.width == 0 || piece.count == 0) return true;
  const int64_t room = (bytes - piece.at) / piece.width;
  return piece.to == nullptr ? piece.count <= room : all_below(piece.to, piece.count, room);
}

}  // namespace ecrm

#define ECRM_LOOPS "pieces/loops.h"
#include "each_set.h"

// The first piece that does not fit the source or the `bytes` of the target; -1: all pieces fit.
ECRM_ENTRY int64_t ecrm_first_bad_piece(int64_t bytes, const ecrm::Piece* pieces, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (!ecrm::fits(pieces[i], bytes)) return i;
  return -1;
}

// Writes the addresses of `rows` rows: the sources from which the pieces would copy the rows.
// Returns whether every row is in a piece.
ECRM_ENTRY int ecrm_piece_addresses(const uint8_t** out, int64_t rows, const ecrm::Piece* pieces,
                                    int64_t n) {
  for (int64_t row = 0; row < rows; ++row) out[row] = nullptr;
  for (int64_t i = 0; i < n; ++i) {
    const ecrm::Piece& piece = pieces[i];
    for (int64_t row = 0; row < piece.count; ++row)
      out[piece.to == nullptr ? row : piece.to[row]] =
          piece.source + (piece.picked == nullptr ? row : piece.picked[row]) * piece.width;
  }
  for (int64_t row = 0; row < rows; ++row)
    if (out[row] == nullptr) return 0;
  return 1;
}

ECRM_ENTRY void ecrm_copy_pieces(uint8_t* out, const ecrm::Piece* pieces, int64_t n) {
  ECRM_PICK(copy)(out, pieces, n);
}
