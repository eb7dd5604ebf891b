#include "python_request.h"

#include <algorithm>

#include "bindings.h"
#include "call_queue.h"
#include "engine.h"

namespace nb = nanobind;

namespace dure {

namespace {

constexpr int64_t kSliceNs = 100'000'000;

// Without a limit this thread runs what has not begun. Ctrl-C meanwhile breaks the group, as in a
// synchronous call; while it waits for another thread, it leaves the operation alone. With a limit,
// or where a call of this thread is under way (below a signal handler), wait in slices, so that
// signal handlers run.
bool wait_for(Request& request, nb::handle seconds) {
    if (request.done()) return true;
    const CallQueue* queue = request.queue();
    if (seconds.is_none() && queue && !PythonCall::inside(queue->subject())) {
        return call_briefly(queue->subject(), [&] { return request.complete(); });
    }
    const int64_t until =
        seconds.is_none() ? INT64_MAX : now_ns() + nanoseconds(nb::cast<double>(seconds));
    for (;;) {
        const int64_t left = until - now_ns();
        bool done;
        {
            WithoutGil release;
            done = request.wait(std::min(kSliceNs, std::max<int64_t>(left, 0)));
        }
        if (done) return true;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (left <= kSliceNs) return request.done();
    }
}

}  // namespace

PythonRequest::PythonRequest(std::shared_ptr<PendingCall> call, Engine& engine)
    : call_(std::move(call)), owner_(nb::find(engine)), engine_(engine) {}

bool PythonRequest::wait(nb::handle seconds) {
    Request& request = *call_->request;
    if (!wait_for(request, seconds)) return false;
    call_->keep.reset();
    if (request.outcome().status != Status::ok) engine_.raise(request.outcome());
    return true;
}

void bind_request(nb::module_& m) {
    nb::class_<PythonRequest>(m, "Request")
        .def("done", &PythonRequest::done)
        .def("wait", &PythonRequest::wait, nb::arg("timeout_s").none() = nb::none())
        .def_prop_ro("source", &PythonRequest::source);
}

}  // namespace dure
