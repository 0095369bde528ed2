// Compiles the file named by ECRM_LOOPS once per instruction set, in a namespace of the set's name.
// So one library runs on every machine, and a test can force every set.
//
// The file must not have templates: GCC forgets a template's target before the instantiation. Use
// ECRM_INLINE functions with constant arguments instead.
#include "native.h"

namespace ecrm::portable {
#include "lanes/portable.h"
#include ECRM_LOOPS
}  // namespace ecrm::portable

#if defined(ECRM_X86)

#pragma GCC push_options
#pragma GCC target("prfchw,avx2,fma,f16c")
namespace ecrm::avx2 {
#include "lanes/avx2.h"
#include ECRM_LOOPS
}  // namespace ecrm::avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target( \
    "prfchw,avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
namespace ecrm::avx512 {
#define ECRM_LANES_GFNI 0
#include "lanes/avx512.h"
#undef ECRM_LANES_GFNI
#include ECRM_LOOPS
}  // namespace ecrm::avx512
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target( \
    "prfchw,avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,gfni,prefer-vector-width=512")
namespace ecrm::gfni {
#define ECRM_LANES_GFNI 1
#include "lanes/avx512.h"
#undef ECRM_LANES_GFNI
#include ECRM_LOOPS
}  // namespace ecrm::gfni
#pragma GCC pop_options

#endif
