// What the binding files share. One file a class; docstrings live in Python (_engine.pyi, shm.py).
#pragma once

#include <nanobind/nanobind.h>

namespace dure {
void bind_group(nanobind::module_& m);
void bind_outcome(nanobind::module_& m);
void bind_shared_block(nanobind::module_& m);
void bind_ticket(nanobind::module_& m);
}  // namespace dure
