#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "types.h"

namespace nb = nanobind;

namespace dure {

void bind_outcome(nb::module_& m) {
    nb::class_<Outcome>(m, "Outcome")
        .def_prop_ro("status", [](const Outcome& o) { return static_cast<int>(o.status); })
        .def_prop_ro("op", [](const Outcome& o) { return std::string(name_of(o.op)); })
        .def_ro("channel", &Outcome::channel)
        .def_ro("seq", &Outcome::seq)
        .def_ro("peer", &Outcome::peer)
        .def_ro("reporter", &Outcome::reporter)
        .def_ro("missing", &Outcome::missing)
        .def_ro("calls", &Outcome::calls)
        .def_ro("detail", &Outcome::detail);
}

}  // namespace dure
