// Element-wise reduction of one range over all ranks.
#pragma once

#include <cstddef>

#include "types.h"

namespace dure {

// The operands of one reduction: `count` elements from each of `sources[0..n)`, combined in that
// order, into each of `outs[0..num_outs)`. An out may be one of the sources, where both have one
// dtype. A premultiplied sum takes each source times its factor, as wide as it accumulates.
struct Operands {
    void* const* outs;
    int num_outs;
    const void* const* sources;
    int n;
    size_t count;
    const double* factors = nullptr;
};

using ReduceFn = void (*)(const Operands&);

// The kernel for a pair, for the best instruction set of this machine; null where the reduction has
// no meaning for the dtype.
ReduceFn reduce_kernel(DType dtype, Reduction reduction);

// As above, from one dtype into another, without rounding in between: sums, averages and
// premultiplied sums of bf16 and f16 into f32, and of f32 into these.
ReduceFn reduce_kernel(DType from, DType into, Reduction reduction);

// The instruction set in use: "generic", "avx2" or "avx512".
const char* kernel_isa();

// For tests: use `isa` from now on. Returns false where this machine cannot.
bool select_kernel_isa(const char* isa);

// From now on use nothing above `most`, one of these names: the best that this machine has up to
// it; "generic" also keeps from the processor's checksum. False, and nothing is changed, where it
// is no such name. Before any other thread uses the engine.
bool limit_isa(const char* most);

}  // namespace dure
