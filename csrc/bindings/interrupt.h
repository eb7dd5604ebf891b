// Ctrl-C during a wait.
//
// The core asks now and then whether to give up. Only a thread that came from Python, and is inside
// one of our calls, may answer: it takes the GIL back and lets Python run signal handlers. What a
// handler raised stays set and is thrown when the call returns.
#pragma once

#include <nanobind/nanobind.h>

namespace dure {

class PythonCall {
  public:
    PythonCall() { current() = this; }
    ~PythonCall() { current() = nullptr; }
    PythonCall(const PythonCall&) = delete;
    PythonCall& operator=(const PythonCall&) = delete;

    // For the core: true if a handler raised.
    static bool interrupted() {
        if (!current()) return false;
        nanobind::gil_scoped_acquire gil;
        return PyErr_CheckSignals() != 0;
    }

  private:
    static PythonCall*& current() {
        static thread_local PythonCall* call = nullptr;
        return call;
    }
};

// Run `body` without the GIL; throw what a signal handler raised meanwhile.
template <typename F>
auto call_without_gil(F body) {
    PythonCall call;
    auto result = [&] {
        nanobind::gil_scoped_release release;
        return body();
    }();
    if (PyErr_Occurred()) throw nanobind::python_error();
    return result;
}

}  // namespace dure
