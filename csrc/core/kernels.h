// Element-wise reduction of one range over all ranks.
#pragma once

#include <cstddef>

#include "types.h"

namespace dure {

// The operands of one reduction: `count` elements from each of `sources[0..n)`, combined in that
// order, into each of `outs[0..num_outs)`. An out may be one of the sources.
struct Operands {
    void* const* outs;
    int num_outs;
    const void* const* sources;
    int n;
    size_t count;
};

using ReduceFn = void (*)(const Operands&);

// The kernel for a pair, for the best instruction set of this machine; null where the reduction has
// no meaning for the dtype.
ReduceFn reduce_kernel(DType dtype, Reduction reduction);

// The instruction set in use: "generic", "avx2" or "avx512".
const char* kernel_isa();

// For tests: use `isa` from now on. Returns false where this machine cannot.
bool select_kernel_isa(const char* isa);

}  // namespace dure
