// Included by each_set.h's loops of several operations, once per instruction set: no guard.

// Copies a row, four lanes at a time without a branch. If the width is not a multiple of lanes, the
// last lane overlaps the lane before.
ECRM_INLINE void copy_bytes(uint8_t* to, const uint8_t* from, int64_t width) {
  if (width == 4) {  // row-wise Adagrad's state
    memcpy(to, from, 4);
    return;
  }
  if (width < kLane) {
    lane_store_part(to, lane_load_part(from, width), width);
    return;
  }
  int64_t at = 0;
  for (; at + 4 * kLane <= width; at += 4 * kLane) {
    for (int lane = 0; lane < 4; ++lane)
      lane_store(to + at + lane * kLane, lane_load(from + at + lane * kLane));
  }
  for (; at + kLane <= width; at += kLane) lane_store(to + at, lane_load(from + at));
  if (at < width) lane_store(to + width - kLane, lane_load(from + width - kLane));
}
