#include "tensor.h"

#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "bindings.h"
#include "dlpack.h"
#include "symmetric_heap.h"

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
    PyObject* hooks = nullptr;                        // the list of hooks of dure.trace
    // The variables of torch.autograd.profiler, and the name of the one that is True while a
    // profiler runs in this process. A look at it takes 10 ns; torch's functions take no less.
    PyObject *profiler = nullptr, *profiler_runs = nullptr;

    // The note "Torch's own functions"; each is nullptr where it was not found.
    const void* const* (*tracing_state)() = nullptr;  // a shared pointer, null outside of a trace
    int64_t (*num_modes)() = nullptr;
    void (*bump_version)(const void* tensor) = nullptr;
    size_t tensor_at = 0;  // offset in bytes of the pointer in a Python tensor
    // Their equivalents in Python.
    PyObject *is_tracing = nullptr, *count_modes = nullptr, *increment_version = nullptr;
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

template <typename F>
void find(const char* library, const char* name, F& function) {
    void* loaded = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    if (!loaded) return;
    function = reinterpret_cast<F>(dlsym(loaded, name));
    dlclose(loaded);  // torch itself keeps it loaded
}

int64_t version_of(nb::handle tensor) { return nb::cast<int64_t>(tensor.attr("_version")); }

// Find `bump_version` and the pointer in a Python tensor, and test them with `sample`.
void find_version_counter(Torch& known, nb::handle sample) {
    find("libtorch_cpu.so", "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",
         known.bump_version);
    if (!known.bump_version) return;
    const auto wanted = nb::cast<uintptr_t>(sample.attr("_cdata"));
    const auto* object = reinterpret_cast<const char*>(sample.ptr());
    const auto end = static_cast<size_t>(Py_TYPE(sample.ptr())->tp_basicsize);
    for (size_t at = sizeof(PyObject); at + sizeof(uintptr_t) <= end; at += sizeof(uintptr_t)) {
        uintptr_t word = 0;
        std::memcpy(&word, object + at, sizeof word);
        if (word == wanted) {
            known.tensor_at = at;
            break;
        }
    }
    const int64_t before = version_of(sample);
    if (known.tensor_at) known.bump_version(object + known.tensor_at);
    if (version_of(sample) != before + 1) known.bump_version = nullptr;
}

void find_torch_functions(Torch& known, nb::handle c, nb::handle sample) {
    find("libtorch_cpu.so", "_ZN5torch3jit6tracer15getTracingStateEv", known.tracing_state);
    find("libc10.so", "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv", known.num_modes);
    known.is_tracing = nb::object(c.attr("_is_tracing")).release().ptr();
    known.count_modes = nb::object(c.attr("_len_torch_dispatch_stack")).release().ptr();
    known.increment_version = nb::object(c.attr("_increment_version")).release().ptr();
    find_version_counter(known, sample);
    nb::object profiler = nb::module_::import_("torch.autograd.profiler");
    known.profiler_runs = PyUnicode_InternFromString("_is_profiler_enabled");
    known.profiler = nb::object(profiler.attr("__dict__")).release().ptr();
}

// Whether a Python function without arguments returns true, or raises. False before torch is known.
bool ask(PyObject* function) {
    if (!function) return false;
    PyObject* answer = PyObject_CallNoArgs(function);
    const int truth = answer ? PyObject_IsTrue(answer) : 1;
    Py_XDECREF(answer);
    PyErr_Clear();
    return truth != 0;
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

bool read_plain(nb::handle tensor, PlainTensor& out, dlpack::Tensor& t) {
    const Torch& known = torch();
    const PyTypeObject* type = Py_TYPE(tensor.ptr());
    if (!known.api || (type != known.tensor && type != known.parameter)) return false;
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

// ---- a small tensor as bytes, and back ----------------------------------------------------------

// What stands before the memory: the element's type, and the sizes.
struct PackedHead {
    uint8_t needs_gradient, code, bits;
    uint8_t ndim;
};

// A plain tensor of at most `most` bytes, with a head, as bytes; None: another one, or one in the
// symmetric heap, whose memory itself can be told of.
nb::object pack_tensor(nb::handle tensor, size_t most, bool needs_gradient) {
    PlainTensor plain;
    dlpack::Tensor t;
    if (!read_plain(tensor, plain, t) || plain.block.bytes > most || t.ndim > 255 ||
        SymmetricHeap::of_process().shares(plain.block.data, plain.block.bytes))
        return nb::none();
    const PackedHead head{needs_gradient, t.dtype.code, t.dtype.bits, static_cast<uint8_t>(t.ndim)};
    const size_t sizes = head.ndim * sizeof(int64_t);
    PyObject* made = PyBytes_FromStringAndSize(
        nullptr, static_cast<Py_ssize_t>(sizeof head + sizes + plain.block.bytes));
    if (!made) throw nb::python_error();
    char* to = PyBytes_AS_STRING(made);
    std::memcpy(to, &head, sizeof head);
    std::memcpy(to + sizeof head, t.shape, sizes);
    std::memcpy(to + sizeof head + sizes, plain.block.data, plain.block.bytes);
    return nb::steal(made);
}

size_t up(size_t bytes) { return (bytes + 63) / 64 * 64; }

// A tensor of bytes that `pack_tensor` has made, perhaps in another process.
nb::object unpack_tensor(const nb::bytes& packed) {
    const char* from = packed.c_str();
    PackedHead head{};
    if (packed.size() < sizeof head) throw nb::value_error("no tensor");
    std::memcpy(&head, from, sizeof head);
    const size_t sizes = head.ndim * sizeof(int64_t), before = sizeof head + sizes;
    const DType dtype = dtype_of(head.code, head.bits);
    if (!torch().api || dtype == DType::opaque || packed.size() < before)
        throw nb::value_error("no tensor");
    const size_t bytes = packed.size() - before, start = up(sizeof(dlpack::Managed) + sizes);
    // One block: what torch is told, the sizes, the memory.
    std::unique_ptr<std::byte, decltype(&std::free)> block(
        static_cast<std::byte*>(std::aligned_alloc(64, start + up(bytes))), &std::free);
    if (!block) throw std::bad_alloc();
    auto* managed = new (block.get()) dlpack::Managed{};
    auto* shape = reinterpret_cast<int64_t*>(managed + 1);
    std::memcpy(shape, from + sizeof head, sizes);
    size_t counted = item_bytes(dtype);
    for (int i = 0; i < head.ndim; i++) {
        if (shape[i] <= 0 || static_cast<size_t>(shape[i]) > bytes / counted)
            throw nb::value_error("a tensor that does not fit its memory");
        counted *= static_cast<size_t>(shape[i]);
    }
    if (counted != bytes) throw nb::value_error("a tensor that does not fit its memory");
    std::memcpy(block.get() + start, from + before, bytes);
    managed->version = {dlpack::kMajor, 0};
    managed->end = [](dlpack::Managed* self) { std::free(self); };
    managed->tensor = {block.get() + start,
                       {dlpack::kCpu, 0},
                       head.ndim,
                       {head.code, head.bits, 1},
                       shape,
                       nullptr,
                       0};
    void* made = nullptr;
    if (torch().api->object_of(managed, &made) != 0) throw nb::python_error();
    block.release();
    return nb::steal(static_cast<PyObject*>(made));
}

}  // namespace

bool read_plain(nb::handle tensor, PlainTensor& out) {
    dlpack::Tensor t;
    return read_plain(tensor, out, t);
}

Reduction reduction_of(nb::handle op) {
    const auto& reductions = torch().reductions;
    for (int i = 0; i < kReductions; i++) {
        if (reductions[static_cast<size_t>(i)] == op.ptr()) return static_cast<Reduction>(i);
    }
    return Reduction::none;
}

bool is_watched() {
    const Torch& known = torch();
    if (known.hooks && PyList_GET_SIZE(known.hooks) != 0) return true;
    if (known.profiler && PyDict_GetItemWithError(known.profiler, known.profiler_runs) == Py_True) {
        return true;
    }
    if (known.tracing_state ? *known.tracing_state() != nullptr : ask(known.is_tracing))
        return true;
    return known.num_modes ? known.num_modes() != 0 : ask(known.count_modes);
}

void count_write(nb::handle tensor) {
    const Torch& known = torch();
    if (known.bump_version) {
        try {
            known.bump_version(reinterpret_cast<const char*>(tensor.ptr()) + known.tensor_at);
        } catch (const std::exception&) {  // an inference tensor has no version
        }
        return;
    }
    PyObject* one = PyTuple_Pack(1, tensor.ptr());
    Py_XDECREF(one ? PyObject_CallOneArg(known.increment_version, one) : nullptr);
    Py_XDECREF(one);
    PyErr_Clear();
}

void bind_tensor(nb::module_& m) {
    m.def("know_torch", [](nb::type_object tensor, nb::type_object parameter, nb::list reductions,
                           nb::handle c, nb::handle sample, nb::list hooks) {
        Torch& known = torch();
        known.tensor = reinterpret_cast<PyTypeObject*>(tensor.inc_ref().ptr());
        known.parameter = reinterpret_cast<PyTypeObject*>(parameter.inc_ref().ptr());
        known.hooks = hooks.release().ptr();
        known.is_neg = nb::object(tensor.attr("is_neg")).release().ptr();
        for (size_t i = 0; i < nb::len(reductions) && i < known.reductions.size(); i++) {
            known.reductions[i] = nb::object(reductions[i]).release().ptr();
        }
        find_torch_functions(known, c, sample);
        nb::object capsule = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
        if (capsule.is_none()) return false;
        auto* api = static_cast<const dlpack::ExchangeApi*>(
            PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
        if (!api) throw nb::python_error();
        while (api && api->version.major != dlpack::kMajor) api = api->previous;
        if (api && api->describe && api->object_of) known.api = api;
        return known.api != nullptr;
    });
    m.def("pack_tensor", &pack_tensor);
    m.def("unpack_tensor", &unpack_tensor);
}

}  // namespace dure
