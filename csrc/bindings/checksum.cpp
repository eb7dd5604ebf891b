// Checksums of buffers.
#include <nanobind/stl/string.h>

#include "bindings.h"
#include "crc32c.h"
#include "interrupt.h"

namespace nb = nanobind;

namespace dure {

namespace {

// Below this the sum is there before the GIL would be back.
constexpr Py_ssize_t kShort = 16384;

uint32_t sum_of(nb::handle data, uint32_t before) {
    Py_buffer view;
    if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
    uint32_t sum = 0;
    if (view.len < kShort) {
        sum = crc32c(view.buf, static_cast<size_t>(view.len), before);
    } else {
        const WithoutGil release;
        sum = crc32c(view.buf, static_cast<size_t>(view.len), before);
    }
    PyBuffer_Release(&view);
    return sum;
}

}  // namespace

void bind_checksum(nb::module_& m) { m.def("crc32c", &sum_of, nb::arg(), nb::arg() = 0); }

}  // namespace dure
