#include "group.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>

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
        out.append(nb::make_tuple(entry.seq, name_of(s.op), static_cast<int>(s.dtype),
                                  reduces ? name_of(s.reduction) : "", s.bytes, s.peer, s.tag,
                                  s.async, status, entry.start_ns, entry.end_ns, site.file,
                                  site.line, site.function));
    }
    return out;
}

Options options(int rank, int size, double timeout_s, int cores) {
    return {rank, size, nanoseconds(timeout_s), cores};
}

// What the group is broken by, or None.
nb::object failure_of(Engine& e) {
    Group& group = e.group();
    Status status = Status::ok;
    {
        const WithoutGil release;
        Group::Visit visit(group);
        if (visit && group.broken()) status = group.adopt_verdict();
    }
    if (status == Status::ok) return nb::none();
    return nb::cast(group.outcome_of(status, Op::none));
}

// Break the group for all ranks, unless it is broken.
void condemn(Engine& e, std::string detail) {
    const WithoutGil release;
    Group::Visit visit(e.group());
    if (!visit) return;
    Outcome out;
    out.status = Status::outside;
    out.detail = std::move(detail);
    e.group().condemn(std::move(out));
}

}  // namespace

void bind_group(nb::module_& m) {
    nb::class_<Engine>(m, "Group")
        .def_static(
            "create",
            [](int rank, int size, double timeout_s, int cores, uint64_t nonce) {
                return new Engine(Group::create(options(rank, size, timeout_s, cores), nonce));
            })
        .def_static(
            "attach",
            [](int rank, int size, double timeout_s, int cores, int pid, int fd, uint64_t nonce) {
                return new Engine(
                    Group::attach(options(rank, size, timeout_s, cores), pid, fd, nonce));
            })
        .def_prop_ro("file", [](Engine& e) { return e.group().file(); })
        .def("attached", [](Engine& e) { return e.group().attached(); })
        .def("not_attached", [](Engine& e) { return e.group().not_attached(); })
        .def("wait_attached",
             [](Engine& e, double seconds) {
                 const WithoutGil release;
                 e.group().wait_attached(nanoseconds(seconds));
             })
        .def("ready", [](Engine& e) { e.group().ready(); })
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
        .def("run",
             [](Engine& e, int op, int dtype, int reduction, int root, const nb::list& inputs,
                const nb::list& outputs, bool async) {
                 return e.run(
                     {static_cast<Op>(op), static_cast<DType>(dtype),
                      static_cast<Reduction>(reduction), root, blocks(inputs), blocks(outputs)},
                     async);
             })
        .def("send",
             [](Engine& e, size_t data, size_t bytes, int dtype, int to, int tag, bool async) {
                 return e.send(block(data, bytes), static_cast<DType>(dtype), to, tag, async);
             })
        .def("receive",
             [](Engine& e, size_t data, size_t bytes, int dtype, int from, int tag, bool async) {
                 return e.receive(block(data, bytes), static_cast<DType>(dtype), from, tag, async);
             })
        // Without annotations nanobind's quickest dispatch, which takes anything but None.
        .def("plain_all_reduce", &Engine::plain_all_reduce)
        .def("plain_broadcast", &Engine::plain_broadcast)
        .def("plain_all_gather", &Engine::plain_all_gather)
        .def("plain_reduce_scatter", &Engine::plain_reduce_scatter)
        .def("plain_all_to_all", &Engine::plain_all_to_all)
        .def("plain_barrier", &Engine::plain_barrier)
        .def("plain_send", &Engine::plain_send)
        .def("plain_receive", &Engine::plain_receive)
        .def("flight", &flight_of)
        .def("sender_of", &Engine::sender_of, nb::call_guard<WithoutGil>())
        .def("shared_empty", [](Engine& e, size_t bytes) { return e.shared_empty(bytes, false); })
        .def("host_shared_empty",
             [](Engine& e, size_t bytes) { return e.shared_empty(bytes, true); })
        .def("condemn", &condemn)
        .def("failure", &failure_of)
        .def("has_left",
             [](Engine& e, int rank) {
                 Group::Visit visit(e.group());
                 return !visit || e.group().has_left(rank);
             })
        .def("close", &Engine::close);
}

}  // namespace dure
