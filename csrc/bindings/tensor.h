// Reading a tensor without asking Python attribute by attribute.
//
// torch offers a table of C functions on its tensor type (`__dlpack_c_exchange_api__`, DLPack 1.2
// and later); one of them describes a tensor in place in some 40 ns, without a reference and
// without torch's headers. Only *plain* tensors are read this way: of torch's own type, dense,
// contiguous, not empty, on the CPU, of a real dtype, and not a negated view, whose memory holds
// the values with the wrong sign (DLPack does not tell, so torch is asked). All others take the
// slow path, through Python, which knows what to do with them or what is wrong.
//
// Note "Torch's own functions". Three calls of torch take 70 to 270 ns through Python, a quarter of
// a small collective: whether a graph is traced, whether there is a dispatch mode, and incrementing
// a version counter. Torch's libraries export the C++ functions behind them, which take a few
// nanoseconds, and no type except a tensor, which is a pointer to its implementation. The position
// of that pointer in a Python tensor is found by its value (`_cdata`). Functions that are not found
// as expected are called through Python.
#pragma once

#include <nanobind/nanobind.h>

#include "types.h"

namespace dure {

struct PlainTensor {
    Block block;
    DType dtype = DType::opaque;
    int64_t rows = 1;  // its first dimension
};

// False where the tensor is not plain; never leaves a Python error set.
bool read_plain(nanobind::handle tensor, PlainTensor& out);

// The code of a `ReduceOp` object; `none` for others.
Reduction reduction_of(nanobind::handle op);

// Whether a hook of dure.trace listens, one of torch's profilers runs in this process, or this
// thread captures a graph by torch.jit.trace or is in a dispatch mode (make_fx, FakeTensorMode).
// Then the fast path does not touch memory, and the slow path decides.
bool is_watched();

// Increment the version counter of a plain tensor, by which autograd detects a write.
void count_write(nanobind::handle tensor);

void bind_tensor(nanobind::module_& m);

}  // namespace dure
