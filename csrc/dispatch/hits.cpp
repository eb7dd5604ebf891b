// A hit of DTensor's dispatch, over CPython's API alone: build the key of a call, look its plan up,
// run the operator on the parts, wrap what it returns. All other calls go to the Python functions
// that `bind` receives. These (src/dure/tensor/dispatch.py, wrapping.py, dtensor.py) define what a
// hit does; tests/tensor/ranks/test_dispatch.py runs the same cases here and there. Keys, plans and
// their table are Python's.
//
// Attributes in slots are read at their place in the object. What is borrowed is held by the
// arguments or by the table's plan, which is owned while it is used: an operator may run any
// Python.

#include <Python.h>
#include <structmember.h>

#include <utility>

namespace {

// An owned reference, or none.
class Ref {
  public:
    explicit Ref(PyObject* object = nullptr) : object_(object) {}
    Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Ref(const Ref&) = delete;
    Ref& operator=(const Ref&) = delete;
    Ref& operator=(Ref&&) = delete;
    ~Ref() { Py_XDECREF(object_); }
    static Ref of(PyObject* borrowed) { return Ref(Py_XNewRef(borrowed)); }
    PyObject* get() const { return object_; }
    PyObject* release() { return std::exchange(object_, nullptr); }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    PyObject* object_;
};

// Where a class keeps the attribute of a name in `__slots__`.
struct Slot {
    Py_ssize_t offset = 0;

    bool find(PyObject* type, const char* name) {
        Ref descriptor(PyObject_GetAttrString(type, name));
        if (!descriptor) return false;
        if (!Py_IS_TYPE(descriptor.get(), &PyMemberDescr_Type)) {
            PyErr_Format(PyExc_TypeError, "%R keeps no %s in a slot", type, name);
            return false;
        }
        offset = reinterpret_cast<PyMemberDescrObject*>(descriptor.get())->d_member->offset;
        return true;
    }
    // Borrowed; null where the attribute is not set.
    PyObject*& at(PyObject* object) const {
        return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
    }
};

// What `bind` handed over; never released.
PyTypeObject* dtensor;
PyTypeObject* tensor;
PyObject *plans, *by_value, *make, *in_inference, *strided, *grad;
PyObject *slow_dispatch, *slow_wrap, *slow_grad;
PyObject* other_strides;  // the exception of a view that the strides of a part do not allow
PyObject *empty, *device_name;
Slot part, spec, copied_at;                  // of a DTensor
Slot spec_meta, spec_partial;                // of a DTensorSpec
Slot meta_shape, meta_stride, meta_dtype;    // of a TensorMeta
Slot plan_local, plan_output, plan_written;  // of a Plan

bool is_whole(PyObject* object) {  // a DTensor with all that it needs, and no copy of a view
    return Py_IS_TYPE(object, dtensor) && part.at(object) && spec.at(object) &&
           copied_at.at(object) == Py_None;
}

// ---- keys ---------------------------------------------------------------------------------------

// What stands for an argument in a key (dispatch.py, `_key_of`). Null without an error: the call is
// none for this way, a plain tensor or a list of tensors is among its arguments.
PyObject* key_of(PyObject* op, PyObject* argument) {
    if (Py_IS_TYPE(argument, dtensor))
        return is_whole(argument) ? Py_NewRef(spec.at(argument)) : nullptr;
    if (argument == Py_None || PyLong_CheckExact(argument)) return Py_NewRef(argument);
    PyObject* kind = reinterpret_cast<PyObject*>(Py_TYPE(argument));
    if (PyFloat_CheckExact(argument)) {
        int valued = PySet_Contains(by_value, op);
        if (valued < 0) return nullptr;
        return valued ? PyTuple_Pack(2, kind, argument) : Py_NewRef(kind);
    }
    if (PyList_CheckExact(argument) || PyTuple_CheckExact(argument)) {
        Py_ssize_t count = PySequence_Fast_GET_SIZE(argument);
        Ref keys(PyTuple_New(count));
        for (Py_ssize_t i = 0; keys && i < count; i++) {
            PyObject* one = PySequence_Fast_GET_ITEM(argument, i);
            PyObject* key = Py_IS_TYPE(one, dtensor) ? nullptr : key_of(op, one);
            if (!key) return nullptr;
            PyTuple_SET_ITEM(keys.get(), i, key);
        }
        return keys.release();
    }
    if (PyObject_TypeCheck(argument, tensor)) return nullptr;
    return PyTuple_Pack(2, kind, argument);
}

// The plan of a call; none, with or without an error, where there is none.
Ref find_plan(PyObject* op, PyObject* args, PyObject* kwargs) {
    Py_ssize_t count = PyTuple_GET_SIZE(args), named = kwargs ? PyDict_GET_SIZE(kwargs) : 0;
    Ref key(PyTuple_New(1 + count + 2 * named));
    if (!key) return Ref();
    PyTuple_SET_ITEM(key.get(), 0, Py_NewRef(op));
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject* one = key_of(op, PyTuple_GET_ITEM(args, i));
        if (!one) return Ref();
        PyTuple_SET_ITEM(key.get(), 1 + i, one);
    }
    PyObject *name, *argument;
    for (Py_ssize_t at = 0, i = 1 + count; named && PyDict_Next(kwargs, &at, &name, &argument);
         i += 2) {
        PyObject* one = key_of(op, argument);
        if (!one) return Ref();
        PyTuple_SET_ITEM(key.get(), i, Py_NewRef(name));
        PyTuple_SET_ITEM(key.get(), i + 1, one);
    }
    return Ref::of(PyDict_GetItemWithError(plans, key.get()));
}

// ---- wrapping -----------------------------------------------------------------------------------

PyObject* wrap_one(PyObject* local, PyObject* of) {
    Ref inference(PyObject_CallNoArgs(in_inference));
    if (!inference) return nullptr;
    if (inference.get() != Py_False)
        return PyObject_CallFunctionObjArgs(slow_wrap, local, of, nullptr);
    PyObject* meta = spec_meta.at(of);
    Ref device(PyObject_GetAttr(local, device_name));
    if (!device) return nullptr;
    PyObject* given[] = {reinterpret_cast<PyObject*>(dtensor),
                         meta_shape.at(meta),
                         meta_stride.at(meta),
                         Py_None,
                         Py_None,
                         meta_dtype.at(meta),
                         strided,
                         device.get()};
    Ref made(PyObject_Vectorcall(make, given, 8, nullptr));
    if (!made) return nullptr;
    Py_XSETREF(part.at(made.get()), Py_NewRef(local));
    Py_XSETREF(spec.at(made.get()), Py_NewRef(of));
    Py_XSETREF(copied_at.at(made.get()), Py_NewRef(Py_None));
    return made.release();
}

// Several results, of which some may be None.
PyObject* wrap_all(PyObject* results, PyObject* specs) {
    Py_ssize_t count = PyTuple_GET_SIZE(specs);
    Ref given(PySequence_Fast(results, "an operator of several results returned one"));
    if (!given) return nullptr;
    if (PySequence_Fast_GET_SIZE(given.get()) != count) {
        PyErr_Format(PyExc_TypeError, "an operator of %zd results returned %R", count, results);
        return nullptr;
    }
    Ref wrapped(PyTuple_New(count));
    for (Py_ssize_t i = 0; wrapped && i < count; i++) {
        PyObject *one = PySequence_Fast_GET_ITEM(given.get(), i), *of = PyTuple_GET_ITEM(specs, i);
        PyObject* made = of == Py_None || one == Py_None ? Py_NewRef(one) : wrap_one(one, of);
        if (!made) return nullptr;
        PyTuple_SET_ITEM(wrapped.get(), i, made);
    }
    return wrapped.release();
}

PyObject* wrap(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "wrap takes a part and a spec");
        return nullptr;
    }
    return wrap_one(given[0], given[1]);
}

// ---- dispatch -----------------------------------------------------------------------------------

PyObject* run(PyObject* plan, PyObject* args, PyObject* kwargs) {
    Py_ssize_t count = PyTuple_GET_SIZE(args);
    Ref parts(PyTuple_New(count));
    if (!parts) return nullptr;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject* one = PyTuple_GET_ITEM(args, i);
        PyTuple_SET_ITEM(parts.get(), i, Py_NewRef(Py_IS_TYPE(one, dtensor) ? part.at(one) : one));
    }
    Ref result(PyObject_Call(plan_local.at(plan), parts.get(), kwargs));
    if (!result) return nullptr;
    PyObject *output = plan_output.at(plan), *written = plan_written.at(plan);
    if (written != Py_None) return Py_NewRef(PyTuple_GET_ITEM(args, PyLong_AsSsize_t(written)));
    return PyTuple_CheckExact(output) ? wrap_all(result.get(), output)
                                      : wrap_one(result.get(), output);
}

// DTensor.__torch_dispatch__(cls, func, types, args=(), kwargs=None)
PyObject* dispatch(PyObject*, PyObject* const* given, Py_ssize_t count, PyObject* names) {
    PyObject* values[] = {nullptr, nullptr, nullptr, empty, nullptr};
    if (count > 5) count = 5;
    for (Py_ssize_t i = 0; i < count; i++) values[i] = given[i];
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++) {
        PyObject* name = PyTuple_GET_ITEM(names, i);
        if (PyUnicode_CompareWithASCIIString(name, "args") == 0) values[3] = given[count + i];
        if (PyUnicode_CompareWithASCIIString(name, "kwargs") == 0) values[4] = given[count + i];
    }
    PyObject *op = values[1], *args = values[3],
             *kwargs = values[4] == Py_None ? nullptr : values[4];
    if (!op || !PyTuple_Check(args) || (kwargs && !PyDict_Check(kwargs))) {
        PyErr_SetString(PyExc_TypeError,
                        "__torch_dispatch__ takes an operator, types, a tuple and a dict");
        return nullptr;
    }
    Ref plan = find_plan(op, args, kwargs);
    if (plan && (plan_output.at(plan.get()) != Py_None || plan_written.at(plan.get()) != Py_None)) {
        PyObject* result = run(plan.get(), args, kwargs);
        if (result || !other_strides || !PyErr_ExceptionMatches(other_strides)) return result;
        PyErr_Clear();  // Python makes a copy in the place of the view
    }
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError)) return nullptr;
        PyErr_Clear();  // an argument has no hash: the call has no plan
    }
    PyObject* passed[] = {op, args, kwargs ? kwargs : Py_None};
    return PyObject_Vectorcall(slow_dispatch, passed, 3, nullptr);
}

// ---- lists, gradients ---------------------------------------------------------------------------

// parts(tensors, specs): the part of each tensor that lies as its spec says; plain ones, where the
// spec is None, as they are. None where one is something else.
PyObject* parts(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != 2 || !PyList_Check(given[1]) ||
        !(PyList_Check(given[0]) || PyTuple_Check(given[0]))) {
        PyErr_SetString(PyExc_TypeError, "parts takes tensors and a list of specs");
        return nullptr;
    }
    Py_ssize_t size = PySequence_Fast_GET_SIZE(given[0]);
    if (size != PyList_GET_SIZE(given[1])) {
        PyErr_Format(PyExc_ValueError, "%zd tensors, %zd specs", size, PyList_GET_SIZE(given[1]));
        return nullptr;
    }
    Ref found(PyList_New(size));
    for (Py_ssize_t i = 0; found && i < size; i++) {
        PyObject *one = PySequence_Fast_GET_ITEM(given[0], i), *of = PyList_GET_ITEM(given[1], i);
        bool lies = is_whole(one) && spec.at(one) == of;
        if (!lies && (of != Py_None || Py_IS_TYPE(one, dtensor))) Py_RETURN_NONE;
        PyList_SET_ITEM(found.get(), i, Py_NewRef(lies ? part.at(one) : one));
    }
    return found.release();
}

// DTensor.grad, unless it is terms of a sum, a copy in the place of a view, or no DTensor.
PyObject* read_grad(PyObject*, PyObject* of) {
    Ref found(Py_TYPE(grad)->tp_descr_get(grad, of, reinterpret_cast<PyObject*>(Py_TYPE(of))));
    if (!found || found.get() == Py_None) return found.release();
    const bool whole = is_whole(found.get());
    if (whole && spec_partial.at(spec.at(found.get())) == Py_False) return found.release();
    return PyObject_CallOneArg(slow_grad, of);
}

// The exception after which a call is handed to Python: see dispatch.py, `OtherStrides`.
PyObject* copy_after(PyObject*, PyObject* type) {
    Py_XSETREF(other_strides, Py_NewRef(type));
    Py_RETURN_NONE;
}

// ---- module -------------------------------------------------------------------------------------

PyObject* bind(PyObject*, PyObject* args, PyObject* named) {
    static const char* names[] = {"dtensor",      "tensor",    "spec",     "meta",
                                  "plan",         "plans",     "by_value", "make",
                                  "in_inference", "strided",   "grad",     "slow_dispatch",
                                  "slow_wrap",    "slow_grad", nullptr};
    PyObject *type, *base, *spec_type, *meta_type, *plan_type;
    if (!PyArg_ParseTupleAndKeywords(args, named, "$O!O!OOOO!O!OOOOOOO", const_cast<char**>(names),
                                     &PyType_Type, &type, &PyType_Type, &base, &spec_type,
                                     &meta_type, &plan_type, &PyDict_Type, &plans, &PySet_Type,
                                     &by_value, &make, &in_inference, &strided, &grad,
                                     &slow_dispatch, &slow_wrap, &slow_grad)) {
        return nullptr;
    }
    if (!(part.find(type, "part") && spec.find(type, "spec") && copied_at.find(type, "copied_at") &&
          spec_meta.find(spec_type, "meta") && spec_partial.find(spec_type, "partial") &&
          meta_shape.find(meta_type, "shape") && meta_stride.find(meta_type, "stride") &&
          meta_dtype.find(meta_type, "dtype") && plan_local.find(plan_type, "local") &&
          plan_output.find(plan_type, "output") && plan_written.find(plan_type, "written"))) {
        return nullptr;
    }
    dtensor = reinterpret_cast<PyTypeObject*>(type);
    tensor = reinterpret_cast<PyTypeObject*>(base);
    for (PyObject* kept : {type, base, plans, by_value, make, in_inference, strided, grad,
                           slow_dispatch, slow_wrap, slow_grad}) {
        Py_INCREF(kept);
    }
    Py_RETURN_NONE;
}

template <typename Function>
PyCFunction as_method(Function* function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"bind", as_method(bind), METH_VARARGS | METH_KEYWORDS,
     "Take the classes, tables and functions of Python."},
    {"copy_after", copy_after, METH_O,
     "Take the exception of a view that the strides of a part do not allow."},
    {"dispatch", as_method(dispatch), METH_FASTCALL | METH_KEYWORDS,
     "DTensor.__torch_dispatch__ (dispatch.py)."},
    {"wrap", as_method(wrap), METH_FASTCALL,
     "Return a DTensor over a part that needs no gradient."},
    {"parts", as_method(parts), METH_FASTCALL,
     "Return the parts of tensors that lie as specs say, or None."},
    {"read_grad", read_grad, METH_O, "Return a DTensor's gradient, reduced if it would be terms."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_hits", "The hit of DTensor's dispatch.", -1,
                      methods};

}  // namespace

PyMODINIT_FUNC PyInit__hits() {
    empty = PyTuple_New(0);
    device_name = PyUnicode_InternFromString("device");
    return empty && device_name ? PyModule_Create(&module) : nullptr;
}
