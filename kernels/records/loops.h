// Compiled once per instruction set by each_set.h.
// A record is the bytes of one row in each part, one part after the other.

#include "records/copy_bytes.h"

// Like copy_bytes. The overlapping last lane is computed before the first write, and written last.
ECRM_INLINE void xor_bytes(uint8_t* to, const uint8_t* from, int64_t width) {
  if (width == 4) {  // row-wise Adagrad's state
    uint32_t value, change;
    memcpy(&value, to, 4);
    memcpy(&change, from, 4);
    value ^= change;
    memcpy(to, &value, 4);
    return;
  }
  if (width < kLane) {
    lane_store_part(to, lane_load_part(to, width) ^ lane_load_part(from, width), width);
    return;
  }
  const Lane tail = lane_load(to + width - kLane) ^ lane_load(from + width - kLane);
  int64_t at = 0;
  for (; at + 4 * kLane <= width; at += 4 * kLane) {
    for (int lane = 0; lane < 4; ++lane) {
      uint8_t* const target = to + at + lane * kLane;
      lane_store(target, lane_load(target) ^ lane_load(from + at + lane * kLane));
    }
  }
  for (; at + kLane <= width; at += kLane)
    lane_store(to + at, lane_load(to + at) ^ lane_load(from + at));
  if (at < width) lane_store(to + width - kLane, tail);
}

constexpr int64_t kRowsAhead = 24;

ECRM_INLINE void fetch_parts(const Parts& parts, const int64_t* rows, int64_t i, int64_t n) {
  const int64_t row = rows[i + kRowsAhead < n ? i + kRowsAhead : n - 1];
  for (int64_t part = 0; part < parts.count; ++part) {
    fetch_row(parts.base[part] + row * parts.stride[part], parts.width[part]);
  }
}

static void gather(const Parts& parts, const int64_t* rows, int64_t n, uint8_t* records,
                   int64_t record_stride) {
  for (int64_t i = 0; i < n; ++i) {
    fetch_parts(parts, rows, i, n);
    uint8_t* record = records + i * record_stride;
    for (int64_t part = 0; part < parts.count; ++part) {
      copy_bytes(record, parts.base[part] + rows[i] * parts.stride[part], parts.width[part]);
      record += parts.width[part];
    }
  }
}

// Row i takes record picked[i]; record i if `picked` is null.
static void scatter(const Parts& parts, const int64_t* rows, int64_t n, const uint8_t* records,
                    int64_t record_stride, const int64_t* picked) {
  for (int64_t i = 0; i < n; ++i) {
    fetch_parts(parts, rows, i, n);
    if (picked != nullptr) {
      fetch_row<0>(records + picked[i + kRowsAhead < n ? i + kRowsAhead : n - 1] * record_stride,
                   parts.width[0]);
    }
    const uint8_t* record = records + (picked == nullptr ? i : picked[i]) * record_stride;
    for (int64_t part = 0; part < parts.count; ++part) {
      copy_bytes(parts.base[part] + rows[i] * parts.stride[part], record, parts.width[part]);
      record += parts.width[part];
    }
  }
}

static void exclusive_or(const Parts& parts, const int64_t* rows, int64_t n, const uint8_t* records,
                         int64_t record_stride) {
  for (int64_t i = 0; i < n; ++i) {
    fetch_parts(parts, rows, i, n);
    const uint8_t* record = records + i * record_stride;
    for (int64_t part = 0; part < parts.count; ++part) {
      xor_bytes(parts.base[part] + rows[i] * parts.stride[part], record, parts.width[part]);
      record += parts.width[part];
    }
  }
}

// Returns the new number of rows in the log. `rows_there` >= n is the number of readable row
// numbers, for prefetching.
static int64_t merge(int32_t* places, const int64_t* rows, int64_t n, int64_t rows_there,
                     const uint8_t* records, int64_t record_stride, int64_t width,
                     int64_t* log_rows, uint8_t* log, int64_t count) {
  const int64_t last = rows_there - 1;
  for (int64_t i = 0; i < n; ++i) {
    __builtin_prefetch(places + rows[i + 2 * kRowsAhead < last ? i + 2 * kRowsAhead : last], 1, 3);
    const int32_t soon = places[rows[i + kRowsAhead < last ? i + kRowsAhead : last]];
    fetch_row(log + (soon == 0 ? count : soon - 1) * width, width);
    const uint8_t* record = records + i * record_stride;
    int32_t& place = places[rows[i]];
    if (place == 0) {
      log_rows[count] = rows[i];
      copy_bytes(log + count * width, record, width);
      place = static_cast<int32_t>(++count);
    } else {
      xor_bytes(log + (place - 1) * width, record, width);
    }
  }
  return count;
}
