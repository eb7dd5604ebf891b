// Calls from Python: who holds its lock (the GIL), and Ctrl-C during a wait.
//
// Letting go of the GIL and taking it back costs 20 ns, more where other threads want it. A short
// call keeps it until it would have to wait for a peer (the core then calls `about_to_wait`), which
// for small tensors mostly does not happen; a long one lets go of it first.
//
// The core asks now and then whether to give up. Only a thread that came from Python, and is inside
// one of our calls, may answer: it takes the GIL back and lets Python run signal handlers. What a
// handler raised stays set and is thrown when the call returns.
//
// A handler may call us again, while the call it interrupted is still on the stack. So a thread
// knows the calls it is inside, each by what the call works on.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <optional>

namespace dure {

inline bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
}

// Lets go of the GIL for a scope. A daemon thread that would take it back while the interpreter
// ends is stopped for good: Python would unwind it (with pthread_exit, before 3.14), which a
// destructor does not survive. It begins to unwind where the end begins during the attempt.
class WithoutGil {
  public:
    WithoutGil() = default;
    ~WithoutGil() {
        while (!last_thread_ && interpreter_ends()) pause();
        try {
            PyEval_RestoreThread(thread_);
        } catch (...) {
            for (;;) pause();
        }
    }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

  private:
    const bool last_thread_ = interpreter_ends();  // nobody else runs Python by then
    PyThreadState* const thread_ = PyEval_SaveThread();
};

// Holds the GIL for a scope, on any thread. Python may unwind the thread here, as above, so this
// must not be noexcept, as nanobind's own is.
class WithGil {
  public:
    WithGil() : state_(PyGILState_Ensure()) {}
    ~WithGil() { PyGILState_Release(state_); }
    WithGil(const WithGil&) = delete;
    WithGil& operator=(const WithGil&) = delete;

  private:
    const PyGILState_STATE state_;
};

class PythonCall {
  public:
    explicit PythonCall(const void* subject) : subject_(subject), outer_(current()) {
        current() = this;
    }
    ~PythonCall() { current() = outer_; }
    PythonCall(const PythonCall&) = delete;
    PythonCall& operator=(const PythonCall&) = delete;

    // Let go of the GIL until the call is over.
    void release() {
        if (!released_) released_.emplace();
    }
    // Take it back; true if a signal handler raised meanwhile.
    bool retake() {
        if (!released_) return false;
        released_.reset();
        return PyErr_Occurred() != nullptr;
    }
    // For the core: this thread's call, if it is one, begins to wait.
    static void about_to_wait() {
        if (current()) current()->release();
    }

    // For the core: true if a handler raised.
    static bool interrupted() {
        if (!current() || interpreter_ends()) return false;
        const WithGil gil;
        return PyErr_CheckSignals() != 0;
    }

    // Whether this thread is inside any call.
    static bool any() { return current() != nullptr; }

    // Whether this thread is inside a call on `subject`.
    static bool inside(const void* subject) {
        for (const PythonCall* c = current(); c; c = c->outer_) {
            if (c->subject_ == subject) return true;
        }
        return false;
    }

  private:
    static PythonCall*& current() {
        static thread_local PythonCall* call = nullptr;
        return call;
    }

    const void* const subject_;
    PythonCall* const outer_;
    std::optional<WithoutGil> released_;
};

// Run `body`, a call on `subject`, without the GIL; throw what a signal handler raised meanwhile.
template <typename F>
auto call_without_gil(const void* subject, F body) {
    PythonCall call(subject);
    call.release();
    auto result = body();
    if (call.retake()) throw nanobind::python_error();
    return result;
}

// As `call_without_gil`, for what is mostly over before another thread could begin: lets go of the
// GIL when it has to wait.
template <typename F>
auto call_briefly(const void* subject, F body) {
    PythonCall call(subject);
    auto result = body();
    if (call.retake()) throw nanobind::python_error();
    return result;
}

}  // namespace dure
