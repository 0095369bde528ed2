// Rows by shard, unique rows unit by unit, and the periods of each unit's rows; see README.md.
#include <algorithm>
#include <vector>

#include "native.h"

namespace ecrm {

constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;

static int bits_of(uint64_t x) { return x == 0 ? 0 : 64 - __builtin_clzll(x); }

// A key and a place in one word: half the bytes to sort, for all keys with room left for a place.
struct InOneWord {
  using Entry = uint64_t;
  int place_bits;
  Entry entry(uint64_t key, uint64_t place) const { return key << place_bits | place; }
  uint64_t key(Entry of) const { return of >> place_bits; }
  int first_bit() const { return place_bits; }
  static uint64_t sorted_by(Entry of) { return of; }
  uint64_t place(Entry of) const { return of & ((uint64_t{1} << place_bits) - 1); }
};

struct InTwoWords {
  struct Entry {
    uint64_t key, place;
  };
  Entry entry(uint64_t key, uint64_t place) const { return {key, place}; }
  uint64_t key(const Entry& of) const { return of.key; }
  int first_bit() const { return 0; }
  static uint64_t sorted_by(const Entry& of) { return of.key; }
  uint64_t place(const Entry& of) const { return of.place; }
};

// Divides by a constant, with a shift if the constant is a power of two. Divisions of row numbers
// are most of the work.
struct Divider {
  explicit Divider(uint64_t by) : by(by), shift((by & (by - 1)) == 0 ? __builtin_ctzll(by) : -1) {}
  uint64_t quotient(uint64_t x) const { return shift >= 0 ? x >> shift : x / by; }
  uint64_t by;
  int shift;
};

// Sorts by key, the least significant digit first, up to the most significant of the largest key.
template <typename Form>
static void sort_by_key(std::vector<typename Form::Entry>& entries, uint64_t largest, Form form) {
  std::vector<typename Form::Entry> other(entries.size());
  for (int shift = 0; shift < 64 && largest >> shift != 0; shift += kDigitBits) {
    const int low = form.first_bit() + shift;
    uint32_t begin[kDigits + 1] = {};
    for (const auto& entry : entries) ++begin[(Form::sorted_by(entry) >> low & (kDigits - 1)) + 1];
    for (int digit = 0; digit < kDigits; ++digit) begin[digit + 1] += begin[digit];
    for (const auto& entry : entries)
      other[begin[Form::sorted_by(entry) >> low & (kDigits - 1)]++] = entry;
    entries.swap(other);
  }
}

// Like ecrm_unique_by_unit, with a bound of the keys.
template <typename Form>
static int64_t unique_by_unit(const int64_t* rows, int64_t n, const Divider& divider,
                              uint64_t span, uint64_t largest, int64_t* unique, int64_t* places,
                              int32_t* starts, int32_t* uses, Form form) {
  std::vector<typename Form::Entry> entries(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t row = static_cast<uint64_t>(rows[i]), period = divider.quotient(row);
    entries[i] = form.entry((row - period * divider.by) * span + period, static_cast<uint64_t>(i));
  }
  sort_by_key(entries, largest, form);
  int64_t count = 0;
  uint64_t before = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t key = form.key(entries[i]), place = form.place(entries[i]);
    if (i == 0 || key != before) {
      if (starts != nullptr) starts[count] = static_cast<int32_t>(i);
      unique[count++] = rows[place];
    }
    places[place] = count - 1;
    if (uses != nullptr) uses[i] = static_cast<int32_t>(place);
    before = key;
  }
  return count;
}

}  // namespace ecrm

// Writes the unique rows to `unique`, unit by unit and ascending within a unit. Writes the place of
// every row among the unique rows to `places`. Returns the number of unique rows. Rows are at least
// 0, n below 2^32. Unless null, `starts` gets the begin of the uses of every unique row in `uses`,
// and n at the end. `uses` gets places in `rows`, row by row, ascending within a row, for n below
// 2^31.
ECRM_ENTRY int64_t ecrm_unique_by_unit(const int64_t* rows, int64_t n, int64_t units,
                                       int64_t* unique, int64_t* places, int32_t* starts,
                                       int32_t* uses) {
  using namespace ecrm;
  if (starts != nullptr) starts[0] = 0;
  if (n == 0) return 0;
  const Divider divider(static_cast<uint64_t>(units));
  const uint64_t span =
      divider.quotient(static_cast<uint64_t>(*std::max_element(rows, rows + n))) + 1;
  const uint64_t largest = divider.by * span - 1;
  const int place_bits = bits_of(static_cast<uint64_t>(n - 1));
  const int64_t count =
      bits_of(largest) + place_bits <= 64
          ? unique_by_unit(rows, n, divider, span, largest, unique, places, starts, uses,
                           InOneWord{place_bits})
          : unique_by_unit(rows, n, divider, span, largest, unique, places, starts, uses,
                           InTwoWords{});
  if (starts != nullptr) starts[count] = static_cast<int32_t>(n);
  return count;
}

// Writes rows[i] / units to `periods`, and the number of rows of every unit to `counts`. Returns
// whether the units of the rows ascend.
ECRM_ENTRY int ecrm_split_by_unit(const int64_t* rows, int64_t n, int64_t units, int64_t* periods,
                                  int64_t* counts) {
  using namespace ecrm;
  const Divider divider(static_cast<uint64_t>(units));
  std::fill(counts, counts + units, 0);
  uint64_t last = 0;
  bool ascend = true;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t row = static_cast<uint64_t>(rows[i]), period = divider.quotient(row),
                   unit = row - period * divider.by;
    periods[i] = static_cast<int64_t>(period);
    ++counts[unit];
    ascend &= unit >= last;
    last = unit;
  }
  return ascend;
}

// Row r of a row space is unit r % k of stripe r / k. The row lies on shard (stripe + m + unit) %
// shards, as local row stripe / shards * k + unit. Writes the places of the rows to `places` and
// the local rows to `local`, shard by shard, in the given order within a shard. Writes the number
// of rows of every shard to `counts`.
ECRM_ENTRY void ecrm_split_by_shard(const int64_t* rows, int64_t n, int64_t k, int64_t m,
                                    int64_t shards, int64_t* places, int64_t* local,
                                    int64_t* counts) {
  using namespace ecrm;
  const Divider by_unit(static_cast<uint64_t>(k)), by_shard(static_cast<uint64_t>(shards));
  struct Place {
    int64_t shard, local;
  };
  std::vector<Place> found(static_cast<size_t>(n));
  std::fill(counts, counts + shards, 0);
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t row = static_cast<uint64_t>(rows[i]), stripe = by_unit.quotient(row),
                   unit = row - stripe * by_unit.by;
    const uint64_t period = by_shard.quotient(stripe);
    // k + m <= shards: less than twice as many
    uint64_t shard = stripe - period * by_shard.by + static_cast<uint64_t>(m) + unit;
    if (shard >= by_shard.by) shard -= by_shard.by;
    found[i] = {static_cast<int64_t>(shard), static_cast<int64_t>(period * by_unit.by + unit)};
    ++counts[shard];
  }
  std::vector<int64_t> next(static_cast<size_t>(shards));
  for (int64_t shard = 1; shard < shards; ++shard)
    next[shard] = next[shard - 1] + counts[shard - 1];
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = next[found[i].shard]++;
    places[at] = i;
    local[at] = found[i].local;
  }
}
