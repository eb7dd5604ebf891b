// Bytes of buffers and files: summed, and copied past the cache.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include "bindings.h"
#include "copying.h"
#include "crc32c.h"
#include "file_copy.h"
#include "interrupt.h"

namespace nb = nanobind;

namespace dure {

namespace {

// Below this the sum is there before the GIL would be back.
constexpr size_t kShort = 16384;

// The bytes of an object of Python's, for a scope.
class Bytes {
  public:
    Bytes(nb::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
    }
    ~Bytes() { PyBuffer_Release(&view_); }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
    size_t size() const { return static_cast<size_t>(view_.len); }

  private:
    Py_buffer view_;
};

uint32_t sum_of(nb::handle object, uint32_t before) {
    const Bytes bytes(object, PyBUF_SIMPLE);
    if (bytes.size() < kShort) return crc32c(bytes.data(), bytes.size(), before);
    const WithoutGil release;
    return crc32c(bytes.data(), bytes.size(), before);
}

void copied(nb::handle to, nb::handle from) {
    const Bytes target(to, PyBUF_WRITABLE), source(from, PyBUF_SIMPLE);
    if (target.size() != source.size()) throw nb::value_error("of different lengths");
    const WithoutGil release;
    stream_copy(target.data(), source.data(), source.size());
}

std::pair<size_t, uint32_t> copied_from_file(int fd, uint64_t at, nb::handle to, bool summed) {
    const Bytes target(to, PyBUF_WRITABLE);
    const WithoutGil release;
    const FileCopy done = copy_from_file(fd, at, target.data(), target.size(), summed);
    return {done.bytes, done.sum};
}

}  // namespace

void bind_checksum(nb::module_& m) {
    m.def("crc32c", &sum_of, nb::arg(), nb::arg() = 0);
    m.def("copy_bytes", &copied);
    m.def("copy_from_file", &copied_from_file);
}

}  // namespace dure
