#include "tensor.h"

#include <array>
#include <utility>

#include "bindings.h"
#include "dlpack.h"

namespace nb = nanobind;

namespace dure {

namespace {

// torch's types and functions; the references are never given back.
struct Torch {
    PyTypeObject* tensor = nullptr;
    PyTypeObject* parameter = nullptr;
    PyObject* is_neg = nullptr;
    const dlpack::ExchangeApi* api = nullptr;
    std::array<PyObject*, kReductions> reductions{};  // ReduceOp objects, by code
};

Torch& torch() {
    static Torch known;
    return known;
}

DType dtype_of(uint8_t code, int bits) {
    switch (code * 256 + bits) {
        case dlpack::kFloat * 256 + 32:
            return DType::f32;
        case dlpack::kFloat * 256 + 64:
            return DType::f64;
        case dlpack::kFloat * 256 + 16:
            return DType::f16;
        case dlpack::kBfloat * 256 + 16:
            return DType::bf16;
        case dlpack::kInt * 256 + 8:
            return DType::i8;
        case dlpack::kInt * 256 + 16:
            return DType::i16;
        case dlpack::kInt * 256 + 32:
            return DType::i32;
        case dlpack::kInt * 256 + 64:
            return DType::i64;
        case dlpack::kUInt * 256 + 8:
            return DType::u8;
        case dlpack::kBool * 256 + 8:
            return DType::boolean;
        default:
            return DType::opaque;
    }
}

// Bytes of a contiguous tensor; 0 where it is not, or empty.
size_t contiguous_bytes(const dlpack::Tensor& t) {
    int64_t items = 1;
    for (int i = t.ndim - 1; i >= 0; i--) {
        if (t.shape[i] != 1 && t.strides && t.strides[i] != items) return 0;
        items *= t.shape[i];
    }
    return static_cast<size_t>(items) * t.dtype.bits / 8;
}

bool ask_whether_negated(PyObject* tensor) {
    PyObject* answer = PyObject_Vectorcall(torch().is_neg, &tensor, 1, nullptr);
    if (!answer) PyErr_Clear();
    const bool no = answer == Py_False;
    Py_XDECREF(answer);
    return !no;
}

// Whether `reference`, a weak one, is to `tensor`, which is alive.
bool refers_to(PyObject* reference, PyObject* tensor) {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject* object = nullptr;
    if (PyWeakref_GetRef(reference, &object) < 0) PyErr_Clear();
    Py_XDECREF(object);
    return object == tensor;
#else
    return PyWeakref_GetObject(reference) == tensor;
#endif
}

// Whether a tensor's values are the negatives of what is in its memory at `data` (the imaginary
// part of a conjugate).
//
// torch gives the GIL away to answer, which takes as long as the rest of a small call in Python. A
// tensor keeps the answer for life, unless it is given other memory. So "no" is remembered of
// tensors that are seen again, each with a weak reference, since another tensor may take the place
// of one that has gone. Where that happens again and again, nothing is remembered.
bool negated(PyObject* tensor, const std::byte* data) {
    struct Known {
        PyObject* tensor = nullptr;  // seen last; may be gone
        const std::byte* data = nullptr;
        PyObject* reference = nullptr;  // to it; owned
        int gone = 0;                   // how often another one had taken its place
    };
    constexpr int kMostGone = 3;
    static std::array<Known, 256> known;
    Known& k = known[reinterpret_cast<uintptr_t>(tensor) / 16 % known.size()];
    const bool again = k.tensor == tensor && k.data == data;
    if (again && k.reference && refers_to(k.reference, tensor)) return false;
    const bool answer = ask_whether_negated(tensor);  // another thread may use `k` meanwhile
    Known now{tensor, data};
    if (again) now.gone = k.gone + (k.reference ? 1 : 0);
    if (again && !answer && now.gone <= kMostGone) {
        now.reference = PyWeakref_NewRef(tensor, nullptr);
        if (!now.reference) PyErr_Clear();
    }
    std::swap(k, now);
    Py_XDECREF(now.reference);
    return answer;
}

}  // namespace

bool read_plain(nb::handle tensor, PlainTensor& out) {
    const Torch& known = torch();
    const PyTypeObject* type = Py_TYPE(tensor.ptr());
    if (!known.api || (type != known.tensor && type != known.parameter)) return false;
    dlpack::Tensor t;
    if (known.api->describe(tensor.ptr(), &t) != 0) {
        PyErr_Clear();
        return false;
    }
    if (!t.data || t.device.type != dlpack::kCpu || t.dtype.lanes != 1) return false;
    out.dtype = dtype_of(t.dtype.code, t.dtype.bits);
    out.rows = t.ndim > 0 ? t.shape[0] : 1;
    out.block = {static_cast<std::byte*>(t.data) + t.byte_offset, contiguous_bytes(t)};
    return out.dtype != DType::opaque && out.block.bytes != 0 &&
           !negated(tensor.ptr(), out.block.data);
}

Reduction reduction_of(nb::handle op) {
    const auto& reductions = torch().reductions;
    for (int i = 0; i < kReductions; i++) {
        if (reductions[static_cast<size_t>(i)] == op.ptr()) return static_cast<Reduction>(i);
    }
    return Reduction::none;
}

void bind_tensor(nb::module_& m) {
    m.def("know_torch", [](nb::type_object tensor, nb::type_object parameter, nb::list reductions) {
        Torch& known = torch();
        known.tensor = reinterpret_cast<PyTypeObject*>(tensor.inc_ref().ptr());
        known.parameter = reinterpret_cast<PyTypeObject*>(parameter.inc_ref().ptr());
        known.is_neg = nb::object(tensor.attr("is_neg")).release().ptr();
        for (size_t i = 0; i < nb::len(reductions) && i < known.reductions.size(); i++) {
            known.reductions[i] = nb::object(reductions[i]).release().ptr();
        }
        nb::object capsule = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
        if (capsule.is_none()) return false;
        auto* api = static_cast<const dlpack::ExchangeApi*>(
            PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
        if (!api) throw nb::python_error();
        while (api && api->version.major != dlpack::kMajor) api = api->previous;
        if (api && api->describe) known.api = api;
        return known.api != nullptr;
    });
}

}  // namespace dure
