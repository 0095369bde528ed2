// Compiled once per instruction set by each_set.h.
// A record is the bytes of one row in each part, one part after the other.

ECRM_INLINE void copy_bytes(uint8_t* to, const uint8_t* from, int64_t width) {
  int64_t at = 0;
  for (; at + kLane <= width; at += kLane) lane_store(to + at, lane_load(from + at));
  if (at < width) lane_store_part(to + at, lane_load_part(from + at, width - at), width - at);
}

ECRM_INLINE void xor_bytes(uint8_t* to, const uint8_t* from, int64_t width) {
  int64_t at = 0;
  for (; at + kLane <= width; at += kLane) lane_store(to + at, lane_load(to + at) ^ lane_load(from + at));
  if (at < width) {
    const int64_t rest = width - at;
    lane_store_part(to + at, lane_load_part(to + at, rest) ^ lane_load_part(from + at, rest), rest);
  }
}

ECRM_INLINE void fetch_parts(const Parts& parts, int64_t row, int for_write) {
  for (int64_t part = 0; part < parts.count; ++part) {
    const uint8_t* from = parts.base[part] + row * parts.stride[part];
    const int64_t width = parts.width[part] < 1024 ? parts.width[part] : 1024;
    if (for_write) {
      for (int64_t at = 0; at < width; at += 64) __builtin_prefetch(from + at, 1, 3);
      __builtin_prefetch(from + width - 1, 1, 3);
    } else {
      for (int64_t at = 0; at < width; at += 64) __builtin_prefetch(from + at, 0, 3);
      __builtin_prefetch(from + width - 1, 0, 3);
    }
  }
}

constexpr int64_t kRowsAhead = 16;

static void gather(const Parts& parts, const int64_t* rows, int64_t n, uint8_t* records, int64_t record_stride) {
  for (int64_t i = 0; i < n; ++i) {
    if (i + kRowsAhead < n) fetch_parts(parts, rows[i + kRowsAhead], 0);
    uint8_t* record = records + i * record_stride;
    for (int64_t part = 0; part < parts.count; ++part) {
      copy_bytes(record, parts.base[part] + rows[i] * parts.stride[part], parts.width[part]);
      record += parts.width[part];
    }
  }
}

static void scatter(const Parts& parts, const int64_t* rows, int64_t n, const uint8_t* records, int64_t record_stride) {
  for (int64_t i = 0; i < n; ++i) {
    if (i + kRowsAhead < n) fetch_parts(parts, rows[i + kRowsAhead], 1);
    const uint8_t* record = records + i * record_stride;
    for (int64_t part = 0; part < parts.count; ++part) {
      copy_bytes(parts.base[part] + rows[i] * parts.stride[part], record, parts.width[part]);
      record += parts.width[part];
    }
  }
}

static void exclusive_or(const Parts& parts, const int64_t* rows, int64_t n, const uint8_t* records, int64_t record_stride) {
  for (int64_t i = 0; i < n; ++i) {
    if (i + kRowsAhead < n) fetch_parts(parts, rows[i + kRowsAhead], 1);
    const uint8_t* record = records + i * record_stride;
    for (int64_t part = 0; part < parts.count; ++part) {
      xor_bytes(parts.base[part] + rows[i] * parts.stride[part], record, parts.width[part]);
      record += parts.width[part];
    }
  }
}
