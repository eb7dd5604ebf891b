#include "ticket.h"

#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <memory>

#include "bindings.h"
#include "interrupt.h"

namespace nb = nanobind;

namespace dure {

namespace {

constexpr int64_t kSliceNs = 100'000'000;

// Wait in slices, so that signal handlers run; `seconds` < 0 means for ever.
bool wait(Ticket& ticket, double seconds) {
    if (ticket.done()) return true;
    const int64_t until = seconds < 0 ? INT64_MAX : now_ns() + nanoseconds(seconds);
    for (;;) {
        const int64_t left = until - now_ns();
        bool done;
        {
            WithoutGil release;
            done = ticket.wait(std::min(kSliceNs, std::max<int64_t>(left, 0)));
        }
        if (done) return true;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (left <= kSliceNs) return ticket.done();
    }
}

}  // namespace

void bind_ticket(nb::module_& m) {
    nb::class_<Ticket>(m, "Ticket")
        .def("done", &Ticket::done)
        .def("wait", &wait, nb::arg("seconds") = -1.0)
        .def_prop_ro("source", &Ticket::source)
        // None after success.
        .def_prop_ro("outcome", [](const Ticket& t) -> nb::object {
            if (!t.done() || t.outcome().status == Status::ok) return nb::none();
            return nb::cast(t.outcome());
        });
}

}  // namespace dure
