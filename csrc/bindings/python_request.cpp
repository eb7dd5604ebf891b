#include "python_request.h"

#include <nanobind/stl/string.h>

#include <algorithm>

#include "bindings.h"
#include "call_queue.h"
#include "engine.h"

namespace nb = nanobind;

namespace dure {

namespace {

constexpr int64_t kSliceNs = 100'000'000;

// In slices, so that signal handlers run.
bool wait_until(Request& request, int64_t until, bool aside) {
    for (;;) {
        const int64_t left = until - now_ns();
        bool done;
        {
            WithoutGil release;
            done = request.wait(std::min(kSliceNs, std::max<int64_t>(left, 0)), aside);
        }
        if (done) return true;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (left <= kSliceNs) return request.done();
    }
}

// Without a limit this thread runs what has not begun. Ctrl-C meanwhile breaks the group, as in a
// synchronous call; while it waits for another thread, it leaves the operation alone. With a limit,
// or where a call of this thread is under way (below a signal handler), this thread only waits.
bool wait_for(Request& request, nb::handle seconds) {
    if (request.done()) return true;
    const CallQueue* queue = request.queue();
    if (seconds.is_none() && queue && !PythonCall::inside(queue->subject())) {
        return call_briefly(queue->subject(), [&] { return request.complete(); });
    }
    const int64_t until =
        seconds.is_none() ? INT64_MAX : now_ns() + nanoseconds(nb::cast<double>(seconds));
    return wait_until(request, until, false);
}

}  // namespace

PythonRequest::PythonRequest(std::shared_ptr<PendingCall> call, Engine& engine)
    : call_(std::move(call)), owner_(nb::find(engine)), engine_(engine) {}

bool PythonRequest::left_behind() const { return !call_->request->done() && engine_.forked(); }

bool PythonRequest::wait(nb::handle seconds) {
    return (left_behind() || wait_for(*call_->request, seconds)) && ended();
}

void PythonRequest::wait_aside() {
    if (!left_behind()) wait_until(*call_->request, INT64_MAX, true);
    ended();
}

// Let go of what the operation worked on; throws its error.
bool PythonRequest::ended() {
    call_->one.reset();
    call_->other.reset();
    if (left_behind()) {
        Outcome forked;
        forked.status = Status::forked;
        engine_.raise(forked);
    }
    const Outcome& outcome = call_->request->outcome();
    if (outcome.status != Status::ok) engine_.raise(outcome);
    return true;
}

void bind_request(nb::module_& m) {
    nb::class_<PythonRequest>(m, "Request")
        .def("done", &PythonRequest::done)
        .def("wait", &PythonRequest::wait, nb::arg("timeout_s").none() = nb::none())
        .def("wait_aside", &PythonRequest::wait_aside)
        .def_prop_ro("site", &PythonRequest::site)
        .def_prop_ro("source", &PythonRequest::source);
}

}  // namespace dure
