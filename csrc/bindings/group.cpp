#include "group.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "bindings.h"
#include "interrupt.h"
#include "lane.h"
#include "mailbox.h"

namespace nb = nanobind;

namespace dure {

namespace {

// A group with its lane for asynchronous collectives and its mailbox. Calls return None when all
// went well, an Outcome when not, or a Ticket if asked to be asynchronous.
class Engine {
  public:
    explicit Engine(std::unique_ptr<Group> group)
        : group_(std::move(group)), mailbox_(*group_), lane_(*group_) {
        group_->set_interrupt(&PythonCall::interrupted);
    }
    ~Engine() { close(); }

    Group& group() { return *group_; }

    nb::object all_reduce(size_t data, size_t bytes, int dtype, int reduction, bool async) {
        const Block tensor{reinterpret_cast<std::byte*>(data), bytes};
        const auto d = static_cast<DType>(dtype);
        const auto r = static_cast<Reduction>(reduction);
        if (!async && lane_.idle()) {
            Status s = call_without_gil([&] { return group_->all_reduce(tensor, d, r); });
            return s == Status::ok ? nb::none() : nb::cast(group_->outcome_of(s, Op::all_reduce));
        }
        return run({Op::all_reduce, d, r, -1, {}, {tensor}}, async);
    }

    nb::object run(Call call, bool async) {
        if (!async && lane_.idle()) {
            Status s = call_without_gil([&] { return group_->run(call); });
            return s == Status::ok ? nb::none() : nb::cast(group_->outcome_of(s, call.op));
        }
        std::shared_ptr<Ticket> ticket = lane_.start(std::move(call));
        if (async) return nb::cast(ticket);
        wait_or_break(*ticket);
        return result(ticket->outcome());
    }

    nb::object send(size_t data, size_t bytes, int dtype, int to, int tag, bool async) {
        const Block block{reinterpret_cast<std::byte*>(data), bytes};
        const auto d = static_cast<DType>(dtype);
        if (async) {
            return nb::cast(
                call_without_gil([&] { return mailbox_.start_send(block, d, to, tag); }));
        }
        return result(call_without_gil([&] { return mailbox_.send(block, d, to, tag); }));
    }

    // A finished ticket where not asynchronous.
    std::shared_ptr<Ticket> receive(size_t data, size_t bytes, int dtype, int from, int tag,
                                    bool async) {
        const Block block{reinterpret_cast<std::byte*>(data), bytes};
        const auto d = static_cast<DType>(dtype);
        if (async) {
            return call_without_gil([&] { return mailbox_.start_receive(block, d, from, tag); });
        }
        auto ticket = std::make_shared<Ticket>();
        int source = -1;
        Outcome out =
            call_without_gil([&] { return mailbox_.receive(block, d, from, tag, &source); });
        ticket->set_source(source);
        ticket->finish(std::move(out));
        return ticket;
    }

    nb::object shared_empty(size_t bytes) {
        Status s = Status::ok;
        auto block = call_without_gil([&] { return group_->shared_empty(bytes, s); });
        return block ? nb::cast(block) : nb::cast(group_->outcome_of(s, Op::shared_empty));
    }

    void close() {
        nb::gil_scoped_release release;
        std::lock_guard hold(closing_);
        if (closed_) return;
        closed_ = true;
        group_->close();
        mailbox_.stop();
        lane_.stop();
        group_->release();
    }

  private:
    // Wait for a queued operation of a synchronous call. Its memory is the caller's, so where a
    // signal handler raises, the operation must end before we return: the group is broken.
    void wait_or_break(Ticket& ticket) {
        while (!call_without_gil([&] { return ticket.wait(100'000'000); })) {
            if (PyErr_CheckSignals() == 0) continue;
            nb::python_error raised;
            Outcome out;
            out.status = Status::interrupted;
            out.peer = group_->rank();
            group_->condemn(std::move(out));
            call_without_gil([&] {
                while (!ticket.wait(100'000'000)) continue;
                return true;
            });
            throw std::move(raised);
        }
    }

    static nb::object result(const Outcome& out) {
        return out.status == Status::ok ? nb::none() : nb::cast(out);
    }

    std::mutex closing_;
    bool closed_ = false;
    std::unique_ptr<Group> group_;
    Mailbox mailbox_;
    Lane lane_;
};

std::vector<Block> blocks(const nb::list& flat) {
    std::vector<Block> out(flat.size() / 2);
    for (size_t i = 0; i < out.size(); i++) {
        out[i] = {reinterpret_cast<std::byte*>(nb::cast<size_t>(flat[2 * i])),
                  nb::cast<size_t>(flat[2 * i + 1])};
    }
    return out;
}

Options options(int rank, int size, double timeout_s, int cores) {
    return {rank, size, static_cast<int64_t>(timeout_s * 1e9), cores};
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
                 nb::gil_scoped_release release;
                 e.group().wait_attached(static_cast<int64_t>(seconds * 1e9));
             })
        .def("ready", [](Engine& e) { e.group().ready(); })
        .def("pid_of", [](Engine& e, int rank) { return e.group().pid_of(rank); })
        .def("set_timeout",
             [](Engine& e, double seconds) {
                 e.group().set_timeout(static_cast<int64_t>(seconds * 1e9));
             })
        .def("all_reduce", &Engine::all_reduce)
        .def("run",
             [](Engine& e, int op, int dtype, int reduction, int root, const nb::list& inputs,
                const nb::list& outputs, bool async) {
                 return e.run(
                     {static_cast<Op>(op), static_cast<DType>(dtype),
                      static_cast<Reduction>(reduction), root, blocks(inputs), blocks(outputs)},
                     async);
             })
        .def("send", &Engine::send)
        .def("receive", &Engine::receive)
        .def("shared_empty", &Engine::shared_empty)
        .def("close", &Engine::close);
}

}  // namespace dure
