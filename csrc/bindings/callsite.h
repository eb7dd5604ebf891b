// Where in the user's program a call was made.
//
// Every operation notes its call site: it costs a look at a few frames, as long as nothing is made
// into text. The innermost frame that is not the library's counts (`set_library_folders`); where
// all frames are (a hook on autograd's own thread), the outermost one. What a frame says is a code
// object and the place in it; each pair is turned into text once and kept.
//
// Threads: needs the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include "types.h"

namespace dure {

// Never nullptr; valid as long as the process.
const Site* call_site();

// The name of the calling thread, valid as long as the process; nullptr for the rank's main thread.
// The name it had when it first called.
const std::string* thread_name();

// What the plain collectives of the calling thread are about, until it says something else.
Subject thread_subject();

void bind_callsite(nanobind::module_& m);

}  // namespace dure
