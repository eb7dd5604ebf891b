#include <nanobind/stl/string.h>

#include <exception>
#include <system_error>

#include "bindings.h"
#include "kernels.h"
#include "layout.h"
#include "types.h"

namespace nb = nanobind;

namespace {

// An error of the system is an OSError in Python, with its errno; FileNotFoundError and the like.
void translate_system_error(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const std::system_error& error) {
        PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
    }
}

}  // namespace

NB_MODULE(_engine, m) {
    using namespace dure;
    // A program may end with its groups open, or its DDP buckets alive in a module's globals: that
    // is no leak, and no news for its user. The kernel takes back what the segment held.
    nb::set_leak_warnings(false);
    nb::register_exception_translator(translate_system_error);
    bind_inbox(m);
    bind_outcome(m);
    bind_request(m);
    bind_symmetric_heap(m);
    bind_group(m);
    bind_callsite(m);
    bind_checksum(m);
    bind_tensor(m);
    m.attr("protocol") = kProtocol;
    m.def("kernel_isa", [] { return std::string(kernel_isa()); });
    m.def("select_kernel_isa",
          [](const std::string& isa) { return select_kernel_isa(isa.c_str()); });
    m.def("limit_isa", [](const std::string& most) { return limit_isa(most.c_str()); });
    // Reduce `n` ranges of `count` elements: for the tests of the kernels.
    m.def("reduce", [](size_t out, nb::list sources, int dtype, int reduction, size_t count) {
        auto kernel = reduce_kernel(static_cast<DType>(dtype), static_cast<Reduction>(reduction));
        if (!kernel) return false;
        std::vector<const void*> from;
        for (nb::handle h : sources) from.push_back(reinterpret_cast<void*>(nb::cast<size_t>(h)));
        void* to[1] = {reinterpret_cast<void*>(out)};
        kernel({to, 1, from.data(), static_cast<int>(from.size()), count});
        return true;
    });
}
