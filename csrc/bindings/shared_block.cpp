#include <nanobind/stl/shared_ptr.h>

#include "arena.h"
#include "bindings.h"

namespace nb = nanobind;

namespace dure {

namespace {

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    SharedBlock* block = nb::inst_ptr<SharedBlock>(nb::handle(self));
    return PyBuffer_FillInfo(view, self, block->data(), static_cast<Py_ssize_t>(block->bytes), 0,
                             flags);
}

PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

}  // namespace

// Supports the buffer protocol: this rank's region, writable. Memory lives as long as a view does.
void bind_shared_block(nb::module_& m) {
    nb::class_<SharedBlock>(m, "SharedBlock", nb::type_slots(slots))
        .def_ro("id", &SharedBlock::id)
        .def_ro("bytes", &SharedBlock::bytes)
        .def("__len__", [](const SharedBlock& b) { return b.bytes; });
}

}  // namespace dure
