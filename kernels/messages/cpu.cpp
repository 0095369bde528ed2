// Messages of many parts written into one buffer, and read; see README.md.
#include <algorithm>
#include <climits>
#include <vector>

#include "native.h"

namespace ecrm {

constexpr int64_t kHead = -1;  // a code, as in __init__.py
constexpr int64_t kShared = 1 << 17, kPicked = 1 << 18, kApart = 1 << 16;
constexpr int64_t kDtypes = 32;

// A part of a message to write, as in __init__.py. The words go among the heads. The payload is
// `count` rows of `width` bytes: row i is row picked[i] of the source, or row i for a null pointer.
struct Part {
  int64_t code, length;
  const int64_t* words;
  int64_t words_count;
  const uint8_t* source;
  int64_t height, width;
  const int64_t* picked;
  int64_t count;
};

// A part of a received message, as in __init__.py.
struct Came {
  int64_t message, code, length;
  int64_t words[4];
  const uint8_t* payload;
};

// Groups of a head and a tensor, each for a message, as in __init__.py.
struct Groups {
  int64_t count;
  const int64_t* messages;
  const int64_t* heads;
  int64_t words;
  const int64_t* counts;
  int64_t code, elements;
  const uint8_t* source;
  int64_t height, width;
  const int64_t* picked;
  const uint8_t* shared;
  int64_t offset, source_elements;
  int64_t* places;
};

constexpr int64_t kWordsOfPicked = 3;

// The tensor of a group with `count` elements or picked rows, after `ahead` of the groups before.
static Part tensor_of(const Groups& groups, int64_t group, int64_t count, int64_t ahead) {
  const int64_t code = groups.code, elements = count * groups.elements, width = groups.width;
  if (groups.picked == nullptr)
    return {code, elements, nullptr, 0, groups.source + width * ahead, count, width, nullptr,
            count};
  const int64_t* const picked = groups.picked + ahead;
  if (groups.shared == nullptr || !groups.shared[group])
    return {code, elements, nullptr, 0, groups.source, groups.height, width, picked, count};
  int64_t* const words = groups.places + kWordsOfPicked * group;
  words[0] = groups.offset;
  words[1] = groups.elements;
  words[2] = count;
  const uint8_t* const rows = reinterpret_cast<const uint8_t*>(picked);
  return {code + kPicked, groups.source_elements, words, kWordsOfPicked, rows, count, 8, nullptr,
          count};
}

static int64_t in_words(int64_t bytes) { return (bytes + 7) / 8; }

// The words of a message, with `parts` parts; -1 for a part with picked rows outside of its source.
static int64_t size_of(const Part* parts, int64_t n, int64_t* bad) {
  int64_t words = n == 0 ? 0 : 1 + 2 * n;
  for (int64_t i = 0; i < n; ++i) {
    const Part& part = parts[i];
    if (part.picked != nullptr && !all_below(part.picked, part.count, part.height)) {
      *bad = i;
      return -1;
    }
    words += part.words_count + in_words(part.width * part.count);
  }
  return words;
}

// Reads one message. Returns the number of parts, -1 for words that are no message. `out` may be
// null: then only the number is told, and little is checked.
static int64_t read(const int64_t* words, int64_t n, int64_t message, const int64_t* item_bytes,
                    Came* out) {
  if (n == 0) return 0;
  const int64_t count = words[0];
  if (count <= 0 || count > (n - 1) / 2) return -1;
  if (out == nullptr) return count;
  int64_t head = 1 + 2 * count, payload = head;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t code = words[1 + 2 * i], length = words[2 + 2 * i];
    if (length < 0) return -1;
    const int64_t more = code == kHead ? length : code >= kPicked ? 3 : code >= kShared ? 1 : 0;
    if (more > n - payload) return -1;
    payload += more;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t code = words[1 + 2 * i], length = words[2 + 2 * i];
    Came& came = out[i];
    came = {message, code, length, {0, 0, 0, 0}, nullptr};
    const int64_t more = code == kHead ? length : code >= kPicked ? 3 : code >= kShared ? 1 : 0;
    for (int64_t w = 0; w < more && w < 4; ++w) came.words[w] = words[head + w];
    head += more;
    if (code == kHead || (code >= kApart && code < kPicked)) continue;
    // picked rows: row numbers, of 8 bytes, and their number is the third word
    const int64_t rows = code >= kPicked ? came.words[2] : length;
    if (code < 0 || (code < kPicked && (code >= kDtypes || item_bytes[code] == 0))) return -1;
    const int64_t bytes = code >= kPicked ? 8 : item_bytes[code];
    if (rows < 0 || rows > (n - payload) * 8 / bytes) return -1;
    came.payload = reinterpret_cast<const uint8_t*>(words + payload);
    payload += in_words(rows * bytes);
  }
  return payload == n ? count : -1;
}

}  // namespace ecrm

#define ECRM_LOOPS "messages/loops.h"
#include "each_set.h"

// Writes the parts of all groups to `out`, message by message, then the counts[i] parts of message i
// from `parts`. Message i has the parts starts[i]..starts[i+1]-1 of `out`. Returns the number of all
// parts; `out` may be null: then only `starts` is written.
ECRM_ENTRY int64_t ecrm_order_parts(const ecrm::Groups* groups, int64_t runs,
                                    const ecrm::Part* parts, const int64_t* counts,
                                    int64_t messages, int64_t* starts, ecrm::Part* out) {
  using namespace ecrm;
  if (out == nullptr) {
    starts[0] = 0;
    std::copy(counts, counts + messages, starts + 1);
    for (int64_t run = 0; run < runs; ++run)
      for (int64_t group = 0; group < groups[run].count; ++group)
        if (groups[run].messages[group] >= 0) starts[groups[run].messages[group] + 1] += 2;
    for (int64_t i = 0; i < messages; ++i) starts[i + 1] += starts[i];
    return starts[messages];
  }
  std::vector<int64_t> next(starts, starts + messages);
  for (int64_t run = 0; run < runs; ++run) {
    const Groups& of_run = groups[run];
    int64_t ahead = 0;
    for (int64_t group = 0; group < of_run.count; ++group) {
      const int64_t message = of_run.messages[group], count = of_run.counts[group];
      if (message >= 0) {
        Part* const pair = out + next[message];
        next[message] += 2;
        pair[0] = {kHead,   of_run.words, of_run.heads + of_run.words * group, of_run.words,
                   nullptr, 0,            0,
                   nullptr, 0};
        pair[1] = tensor_of(of_run, group, count, ahead);
      }
      ahead += count;
    }
  }
  for (int64_t i = 0; i < messages; ++i) {
    std::copy(parts, parts + counts[i], out + next[i]);
    parts += counts[i];
  }
  return starts[messages];
}

// Message i has the parts starts[i]..starts[i+1]-1. Writes to `ends` the byte after each message,
// in a buffer with one message after the other. Returns -1, or the first part with picked rows
// outside of its source.
ECRM_ENTRY int64_t ecrm_message_ends(const ecrm::Part* parts, const int64_t* starts, int64_t n,
                                     int64_t* ends) {
  int64_t end = 0;
  for (int64_t i = 0; i < n; ++i) {
    int64_t bad = 0;
    const int64_t words = ecrm::size_of(parts + starts[i], starts[i + 1] - starts[i], &bad);
    if (words < 0) return starts[i] + bad;
    ends[i] = end += 8 * words;
  }
  return -1;
}

// Writes the messages to `out`, which is as long as ecrm_message_ends says.
ECRM_ENTRY void ecrm_write_messages(int64_t* out, const ecrm::Part* parts, const int64_t* starts,
                                    int64_t n) {
  ECRM_PICK(write)(out, parts, starts, n);
}

// The number of parts of `n` messages of sizes[i] words; -1 - i if message i is none.
ECRM_ENTRY int64_t ecrm_count_parts(const int64_t* const* messages, const int64_t* sizes,
                                    int64_t n) {
  int64_t parts = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t count = ecrm::read(messages[i], sizes[i], i, nullptr, nullptr);
    if (count < 0) return -1 - i;
    parts += count;
  }
  return parts;
}

// Describes all parts of the messages; `item_bytes` are the bytes of an element of each of 32
// codes, 0 for a code that does not exist. Returns as ecrm_count_parts.
ECRM_ENTRY int64_t ecrm_read_messages(const int64_t* const* messages, const int64_t* sizes,
                                      int64_t n, const int64_t* item_bytes, ecrm::Came* out) {
  int64_t parts = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t count = ecrm::read(messages[i], sizes[i], i, item_bytes, out + parts);
    if (count < 0) return -1 - i;
    parts += count;
  }
  return parts;
}
