#include "group.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>

#include "bindings.h"
#include "engine.h"

namespace nb = nanobind;

namespace dure {

namespace {

std::vector<Block> blocks(const nb::list& flat) {
    std::vector<Block> out(flat.size() / 2);
    for (size_t i = 0; i < out.size(); i++) {
        out[i] = {reinterpret_cast<std::byte*>(nb::cast<size_t>(flat[2 * i])),
                  nb::cast<size_t>(flat[2 * i + 1])};
    }
    return out;
}

Block block(size_t data, size_t bytes) { return {reinterpret_cast<std::byte*>(data), bytes}; }

// What the recorder holds, for comm/backends/shm/backend.py.
nb::list flight_of(const Engine& e) {
    nb::list out;
    for (const Flight::Entry& entry : e.flight().entries()) {
        const Flight::Start& s = entry.start;
        const Site nowhere;
        const Site& site = s.site ? *s.site : nowhere;
        const bool reduces = s.reduction != Reduction::none;
        const int status = entry.status == Flight::kRunning ? -1 : entry.status;
        out.append(nb::make_tuple(s.seq, name_of(s.op), static_cast<int>(s.dtype),
                                  reduces ? name_of(s.reduction) : "", s.bytes, s.peer, s.tag,
                                  s.async, status, entry.start_ns, entry.end_ns, site.file,
                                  site.line, site.function, s.channel));
    }
    return out;
}

Call call_of(int op, int dtype, int reduction, int root, const nb::list& inputs,
             const nb::list& outputs, int into, double factor, const Subject& subject) {
    Call call{static_cast<Op>(op),
              static_cast<DType>(dtype),
              static_cast<Reduction>(reduction),
              root,
              blocks(inputs),
              blocks(outputs)};
    call.into = static_cast<DType>(into);
    call.factor = factor;
    call.subject = subject;
    return call;
}

// One channel, as Python sees it: the collectives alone.
struct ChannelView {
    Engine& engine;
    int index;
};

ChannelView channel_of(Engine& e, int index) {
    if (index < 0 || index >= kChannels) throw nb::index_error("a group has channels 0 and 1");
    return {e, index};
}

// ---- the collectives on plain tensors
// ------------------------------------------------------------

// Methods of CPython's own kind, which takes less time than nanobind's and takes None too. `kCall`
// gets the arguments; any other number than `kNumArgs` is an error. With `kStarts` the last one
// says whether the call only starts the operation.
using Arguments = PyObject* const*;

template <auto kCall, int kNumArgs, bool kStarts>
PyObject* plain_method(PyObject* self, Arguments arguments, Py_ssize_t n) noexcept {
    if (n != kNumArgs) return PyErr_Format(PyExc_TypeError, "takes %d arguments", kNumArgs);
    const int async = kStarts ? PyObject_IsTrue(arguments[kNumArgs - 1]) : 0;
    if (async < 0) return nullptr;
    const ChannelView& view = *nb::inst_ptr<ChannelView>(self);
    try {
        return kCall(view.engine, Engine::Place{view.index, async == 1}, arguments).release().ptr();
    } catch (nb::python_error& e) {
        e.restore();
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
    }
    return nullptr;
}

Engine::Place counting(Engine::Place on, PyObject* counts) {
    on.counts = counts == Py_True;
    return on;
}

constexpr auto all_reduce = [](Engine& e, Engine::Place on, Arguments a) {
    return e.plain_all_reduce(counting(on, a[2]), a[0], a[1]);
};
constexpr auto all_reduce_into = [](Engine& e, Engine::Place on, Arguments a) {
    return e.plain_all_reduce_into(on, a[0], a[1], a[2]);
};
constexpr auto broadcast = [](Engine& e, Engine::Place on, Arguments a) {
    return e.plain_broadcast(counting(on, a[2]), a[0], a[1]);
};
constexpr auto all_gather = [](Engine& e, Engine::Place on, Arguments a) {
    return e.plain_all_gather(counting(on, a[2]), a[0], a[1]);
};
constexpr auto reduce_scatter = [](Engine& e, Engine::Place on, Arguments a) {
    return e.plain_reduce_scatter(counting(on, a[3]), a[0], a[1], a[2]);
};
constexpr auto all_gather_list = [](Engine& e, Engine::Place on, Arguments a) {
    return e.plain_all_gather_list(counting(on, a[2]), a[0], a[1]);
};
constexpr auto reduce_scatter_list = [](Engine& e, Engine::Place on, Arguments a) {
    return e.plain_reduce_scatter_list(counting(on, a[3]), a[0], a[1], a[2]);
};
constexpr auto all_to_all_list = [](Engine& e, Engine::Place on, Arguments a) {
    return e.plain_all_to_all_list(counting(on, a[2]), a[0], a[1]);
};
constexpr auto all_to_all = [](Engine& e, Engine::Place on, Arguments a) {
    return e.plain_all_to_all(counting(on, a[2]), a[0], a[1]);
};
constexpr auto all_to_all_cut = [](Engine& e, Engine::Place on, Arguments a) {
    return e.plain_all_to_all_cut(on, a[0], a[1], a[2], a[3]);
};
constexpr auto scatter_cut = [](Engine& e, Engine::Place on, Arguments a) {
    return e.plain_scatter_cut(on, a[0], a[1], a[2], a[3]);
};
constexpr auto barrier = [](Engine& e, Engine::Place on, Arguments) { return e.plain_barrier(on); };
constexpr auto send = [](Engine& e, Engine::Place, Arguments a) {
    return e.plain_send(a[0], a[1], a[2]);
};
constexpr auto receive = [](Engine& e, Engine::Place, Arguments a) {
    return e.plain_receive(a[0], a[1], a[2], a[3] == Py_True);
};

template <auto kCall, int kNumArgs, bool kStarts>
PyMethodDef method(const char* name) {
    const auto function = &plain_method<kCall, kNumArgs, kStarts>;
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
            METH_FASTCALL, nullptr};
}

PyMethodDef plain_methods[] = {
    method<all_reduce, 4, true>("plain_all_reduce"),
    method<all_reduce_into, 4, true>("plain_all_reduce_into"),
    method<broadcast, 4, true>("plain_broadcast"),
    method<all_gather, 4, true>("plain_all_gather"),
    method<reduce_scatter, 5, true>("plain_reduce_scatter"),
    method<all_gather_list, 4, true>("plain_all_gather_list"),
    method<reduce_scatter_list, 5, true>("plain_reduce_scatter_list"),
    method<all_to_all_list, 4, true>("plain_all_to_all_list"),
    method<all_to_all, 4, true>("plain_all_to_all"),
    method<all_to_all_cut, 5, true>("plain_all_to_all_cut"),
    method<scatter_cut, 4, false>("plain_scatter_cut"),
    method<barrier, 1, true>("plain_barrier"),
    method<send, 3, false>("plain_send"),
    method<receive, 4, false>("plain_receive"),
    {},
};

PyType_Slot channel_slots[] = {{Py_tp_methods, plain_methods}, {0, nullptr}};

void bind_channel(nb::module_& m) {
    nb::class_<ChannelView>(m, "Channel", nb::type_slots(channel_slots))
        .def_ro("index", &ChannelView::index)
        .def("enter", [](ChannelView& v) { return v.engine.enter(v.index); })
        .def("leave", [](ChannelView& v) { v.engine.leave(v.index); })
        .def("run", [](ChannelView& v, int op, int dtype, int reduction, int root,
                       const nb::list& inputs, const nb::list& outputs, int into, double factor,
                       const Subject& subject, bool async, nb::handle keep) {
            return v.engine.run(
                v.index,
                call_of(op, dtype, reduction, root, inputs, outputs, into, factor, subject), async,
                keep);
        });
}

// What is known of copies, for comm/backends/shm/copying.py.
nb::tuple copies_of(Engine& e) {
    const CopyPlan& plan = e.group().copies();
    const bool never = plan.once_bytes == kNeverCopiedOnce;
    const nb::object from = never ? nb::none() : nb::object(nb::int_(plan.once_bytes));
    return nb::make_tuple(plan.permitted != 0, plan.learns != 0, from);
}

Options options(int rank, int size, double timeout_s, int cores, bool migrates) {
    return {rank, size, nanoseconds(timeout_s), cores, kLearnCopies, migrates};
}

// What the group is broken by, or None.
nb::object failure_of(Engine& e) {
    if (e.forked()) return nb::none();
    Group& group = e.group();
    Status status = Status::ok;
    {
        const WithoutGil release;
        Group::Visit visit(group);
        if (visit && group.broken()) status = group.adopt_abort();
    }
    if (status == Status::ok) return nb::none();
    return nb::cast(group.outcome_of(status, Op::none));
}

// Break the group for all ranks, unless it is broken.
void abort_group(Engine& e, std::string detail) {
    if (e.forked()) return;
    const WithoutGil release;
    Group::Visit visit(e.group());
    if (!visit) return;
    Outcome out;
    out.status = Status::outside;
    out.detail = std::move(detail);
    e.group().abort(std::move(out));
}

}  // namespace

void bind_group(nb::module_& m) {
    bind_channel(m);
    nb::class_<Engine>(m, "Group")
        .def_static(
            "create",
            [](int rank, int size, double timeout_s, int cores, uint64_t nonce,
               int64_t single_copies, bool migrates) {
                Options wanted = options(rank, size, timeout_s, cores, migrates);
                wanted.single_copies = single_copies;
                return new Engine(Group::create(wanted, nonce));
            },
            nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
            nb::arg("single_copies") = kLearnCopies, nb::arg("migrates") = false)
        .def_static(
            "attach",
            [](int rank, int size, double timeout_s, int cores, int pid, int fd, uint64_t nonce,
               bool migrates) {
                return new Engine(
                    Group::attach(options(rank, size, timeout_s, cores, migrates), pid, fd, nonce));
            },
            nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
            nb::arg("migrates") = false)
        .def_prop_ro("file", [](Engine& e) { return e.group().file(); })
        .def("attached", [](Engine& e) { return e.group().attached(); })
        .def("not_attached", [](Engine& e) { return e.group().not_attached(); })
        .def("wait_attached",
             [](Engine& e, double seconds) {
                 const WithoutGil release;
                 e.group().wait_attached(nanoseconds(seconds));
             })
        .def("ready",
             [](Engine& e) {
                 call_without_gil(&e.group(), [&] {
                     e.group().ready();
                     return true;
                 });
             })
        .def_prop_ro("copies", &copies_of)
        .def("set_eager_bytes", &Engine::set_eager_bytes)
        .def("pid_of",
             [](Engine& e, int rank) {
                 Group::Visit visit(e.group());
                 return visit ? e.group().pid_of(rank) : 0;
             })
        .def("gone",
             [](Engine& e, int rank) {
                 Group::Visit visit(e.group());
                 return visit && (e.group().has_left(rank) || e.group().lost(rank));
             })
        .def("set_timeout",
             [](Engine& e, double seconds) { e.group().set_timeout(nanoseconds(seconds)); })
        .def("channel", &channel_of, nb::keep_alive<0, 1>())
        .def("announce_group",
             [](Engine& e, uint64_t members, bool async) {
                 Call call;
                 call.op = Op::new_group;
                 call.members = members;
                 return e.run(0, std::move(call), async, nb::none());
             })
        .def("set_error", &Engine::set_error)
        .def("send",
             [](Engine& e, size_t data, size_t bytes, int dtype, int to, int tag, bool async,
                nb::handle keep) {
                 return e.send(block(data, bytes), static_cast<DType>(dtype), to, tag, async, keep);
             })
        .def("receive",
             [](Engine& e, size_t data, size_t bytes, int dtype, int from, int tag, bool async,
                nb::handle keep) {
                 return e.receive(block(data, bytes), static_cast<DType>(dtype), from, tag, async,
                                  keep);
             })
        .def("flight", &flight_of)
        .def("sender_of", &Engine::sender_of, nb::call_guard<WithoutGil>())
        .def("host_shared_empty", &Engine::host_shared_empty)
        .def("abort", &abort_group)
        .def("failure", &failure_of)
        .def("has_left",
             [](Engine& e, int rank) {
                 Group::Visit visit(e.group());
                 return !visit || e.group().has_left(rank);
             })
        .def("close", &Engine::close);
}

}  // namespace dure
