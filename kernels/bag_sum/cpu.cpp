// out[bag] = the sum or the mean of the rows of the bag's uses, in order, with scattered rows; see
// README.md.
#include "native.h"

namespace ecrm {

// The arguments, as in __init__.py. Bags are ordered by feature, sums by sample. `weights` may be
// null.
struct Bags {
  float* out;
  const float* const* addresses;
  const int64_t* places;
  const int64_t* lengths;
  const float* weights;
  int64_t uses, samples, features, dimension, mean, bfloat16;
};

}  // namespace ecrm

#define ECRM_LOOPS "bag_sum/loops.h"
#include "each_set.h"

ECRM_ENTRY void ecrm_bag_sum(const ecrm::Bags* bags) { ECRM_PICK(bag_sum)(*bags); }

// Whether no length is negative and the sum of all lengths is `uses`.
ECRM_ENTRY int ecrm_lengths_fit(const int64_t* lengths, int64_t bags, int64_t uses) {
  int64_t left = uses;
  for (int64_t bag = 0; bag < bags; ++bag) {
    if (lengths[bag] < 0 || lengths[bag] > left) return 0;
    left -= lengths[bag];
  }
  return left == 0;
}
