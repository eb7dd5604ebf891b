// What the binding files share. One file a class; docstrings live in Python (_engine.pyi).
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>

namespace dure {
// A time from Python; "for ever" (timedelta.max) becomes a century, to which one can still add.
inline int64_t nanoseconds(double seconds) {
    return static_cast<int64_t>(std::min(seconds * 1e9, 3.2e18));
}

void bind_callsite(nanobind::module_& m);
void bind_checksum(nanobind::module_& m);
void bind_group(nanobind::module_& m);
void bind_inbox(nanobind::module_& m);
void bind_outcome(nanobind::module_& m);
void bind_symmetric_heap(nanobind::module_& m);
void bind_tensor(nanobind::module_& m);
void bind_request(nanobind::module_& m);
}  // namespace dure
