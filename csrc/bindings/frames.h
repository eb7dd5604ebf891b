// Walking the Python frames of the calling thread.
//
// CPython's public functions make an object of every frame that is looked at, 25 ns each, more than
// all else that is done to note a call site. Where the interpreter's own frames are known (their
// layout is part of one minor version, and this file is compiled for one), they are read in place,
// 1 ns each: in Python 3.11 to 3.14. Elsewhere, and in builds without the GIL, the public ones do.
//
// Threads: needs the GIL; nothing may run Python during a walk.
#pragma once

#include <Python.h>

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030F0000 && !defined(Py_GIL_DISABLED)
#define DURE_FRAMES_IN_PLACE
#define Py_BUILD_CORE
#if PY_VERSION_HEX >= 0x030E0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include <internal/pycore_interpframe.h>
#pragma GCC diagnostic pop
#else
#include <internal/pycore_frame.h>
#endif
#undef Py_BUILD_CORE
#else
#include <frameobject.h>
#endif

namespace dure {

// A code object and an offset in it, in bytes.
struct Place {
    PyCodeObject* code = nullptr;
    int offset = 0;
    bool operator==(const Place&) const = default;
};

// The frames of the calling thread, innermost first. What `place` returns is borrowed: it lives as
// long as the frame.
class Frames {
  public:
    Frames(const Frames&) = delete;
    Frames& operator=(const Frames&) = delete;
    explicit operator bool() const { return frame_ != nullptr; }

#if defined(DURE_FRAMES_IN_PLACE)
    Frames() : frame_(complete(current())) {}
    Place place() const {
        const int index = _PyInterpreterFrame_LASTI(frame_);
        return {code(), index * static_cast<int>(sizeof(_Py_CODEUNIT))};
    }
    void next() { frame_ = complete(frame_->previous); }

  private:
#if PY_VERSION_HEX >= 0x030D0000
    static _PyInterpreterFrame* current() { return PyThreadState_Get()->current_frame; }
    PyCodeObject* code() const { return _PyFrame_GetCode(frame_); }
#else
    static _PyInterpreterFrame* current() { return PyThreadState_Get()->cframe->current_frame; }
    PyCodeObject* code() const { return frame_->f_code; }
#endif
    // Skip frames that are being entered, and those of C functions.
    static _PyInterpreterFrame* complete(_PyInterpreterFrame* frame) {
        while (frame && _PyFrame_IsIncomplete(frame)) frame = frame->previous;
        return frame;
    }
    _PyInterpreterFrame* frame_;
#else
    Frames() : frame_(PyEval_GetFrame()) { Py_XINCREF(frame_); }
    ~Frames() { Py_XDECREF(frame_); }
    Place place() const {
        PyCodeObject* code = PyFrame_GetCode(frame_);
        Py_DECREF(code);  // the frame has a reference of its own
        return {code, PyFrame_GetLasti(frame_)};
    }
    void next() {
        PyFrameObject* back = PyFrame_GetBack(frame_);
        Py_DECREF(frame_);
        frame_ = back;
    }

  private:
    PyFrameObject* frame_;
#endif
};

}  // namespace dure
