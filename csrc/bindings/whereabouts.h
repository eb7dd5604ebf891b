#pragma once

#include <string>

namespace dure {

// Where the Python thread `ident` is, as `dure.native.where` words it; "" while the interpreter
// ends. Called without the GIL, on a thread that Python need not know.
std::string python_line_of(unsigned long ident);

}  // namespace dure
