#include "group.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <atomic>
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
        : group_(std::move(group)),
          mailbox_(std::make_unique<Mailbox>(*group_)),
          lane_(std::make_unique<Lane>(*group_)) {
        group_->set_interrupt(&PythonCall::interrupted);
    }
    ~Engine() {
        if (!forked()) {
            close();
            return;
        }
        // The rank lives on in the parent; its threads, and whoever held a lock, do not exist here.
        static_cast<void>(lane_.release());
        static_cast<void>(mailbox_.release());
        static_cast<void>(group_.release());
    }

    Group& group() { return *group_; }

    nb::object all_reduce(size_t data, size_t bytes, int dtype, int reduction, bool async) {
        const Block tensor{reinterpret_cast<std::byte*>(data), bytes};
        const auto d = static_cast<DType>(dtype);
        const auto r = static_cast<Reduction>(reduction);
        if (Status s = refusal(); s != Status::ok) return refused(s, Op::all_reduce);
        if (!async && lane_->idle()) {
            Status s =
                call_without_gil(group_.get(), [&] { return group_->all_reduce(tensor, d, r); });
            return s == Status::ok ? nb::none() : nb::cast(group_->outcome_of(s, Op::all_reduce));
        }
        return run({Op::all_reduce, d, r, -1, {}, {tensor}}, async);
    }

    nb::object run(Call call, bool async) {
        if (Status s = refusal(); s != Status::ok) return refused(s, call.op);
        if (!async && lane_->idle()) {
            Status s = call_without_gil(group_.get(), [&] { return group_->run(call); });
            return s == Status::ok ? nb::none() : nb::cast(group_->outcome_of(s, call.op));
        }
        std::shared_ptr<Ticket> ticket = lane_->start(std::move(call));
        if (async) return nb::cast(ticket);
        wait_or_break(*ticket);
        return result(ticket->outcome());
    }

    nb::object send(size_t data, size_t bytes, int dtype, int to, int tag, bool async) {
        const Block block{reinterpret_cast<std::byte*>(data), bytes};
        const auto d = static_cast<DType>(dtype);
        if (forked()) return refused(Status::forked, Op::send);
        Mailbox* box = mailbox_.get();
        if (async) {
            return nb::cast(
                call_without_gil(box, [&] { return box->start_send(block, d, to, tag); }));
        }
        return result(call_without_gil(box, [&] { return box->send(block, d, to, tag); }));
    }

    // A finished ticket where not asynchronous.
    std::shared_ptr<Ticket> receive(size_t data, size_t bytes, int dtype, int from, int tag,
                                    bool async) {
        const Block block{reinterpret_cast<std::byte*>(data), bytes};
        const auto d = static_cast<DType>(dtype);
        Mailbox* box = mailbox_.get();
        if (async && !forked()) {
            return call_without_gil(box, [&] { return box->start_receive(block, d, from, tag); });
        }
        auto ticket = std::make_shared<Ticket>();
        int source = -1;
        Outcome out;
        if (forked()) {
            out = outcome_of(Status::forked, Op::recv);
        } else {
            out = call_without_gil(box, [&] { return box->receive(block, d, from, tag, &source); });
        }
        ticket->set_source(source);
        ticket->finish(std::move(out));
        return ticket;
    }

    nb::object shared_empty(size_t bytes) {
        Status s = Status::ok;
        if (Status refuses = refusal(); refuses != Status::ok) {
            return refused(refuses, Op::shared_empty);
        }
        auto block = call_without_gil(group_.get(), [&] { return group_->shared_empty(bytes, s); });
        return block ? nb::cast(block) : nb::cast(group_->outcome_of(s, Op::shared_empty));
    }

    // From a signal handler that interrupted a call of ours, this only leaves: the interrupted call
    // still needs the segment. The next `close`, or the destructor, does the rest.
    void close() {
        if (forked()) return;
        if (PythonCall::inside(group_.get()) || PythonCall::inside(mailbox_.get())) {
            return group_->leave();
        }
        nb::gil_scoped_release release;
        std::lock_guard hold(closing_);
        if (closed_) return;
        closed_ = true;
        group_->close();
        mailbox_->stop();
        lane_->stop();
        group_->release();
    }

  private:
    // Wait for a queued operation of a synchronous call. Its memory is the caller's, so where a
    // signal handler raises, the operation must end before we return: the group is broken.
    void wait_or_break(Ticket& ticket) {
        while (!call_without_gil(&ticket, [&] { return ticket.wait(100'000'000); })) {
            if (PyErr_CheckSignals() == 0) continue;
            nb::python_error raised;
            Outcome out;
            out.status = Status::interrupted;
            out.peer = group_->rank();
            {
                // The handler may have closed the group: then the segment is gone.
                Group::Visit visit(*group_);
                if (visit) group_->condemn(std::move(out));
            }
            call_without_gil(&ticket, [&] {
                while (!ticket.wait(100'000'000)) continue;
                return true;
            });
            throw std::move(raised);
        }
    }

    // A child of the process that made the group must not act for its rank.
    bool forked() const { return forks() != made_after_; }
    static std::atomic<uint32_t>& forks() {
        static std::atomic<uint32_t> count{0};
        static const int watched = pthread_atfork(nullptr, nullptr, [] { forks().fetch_add(1); });
        static_cast<void>(watched);
        return count;
    }

    // Why a collective cannot begin.
    Status refusal() const {
        if (forked()) return Status::forked;
        return PythonCall::inside(group_.get()) ? Status::nested : Status::ok;
    }
    static Outcome outcome_of(Status status, Op op) {
        Outcome out;
        out.status = status;
        out.op = op;
        return out;
    }
    static nb::object refused(Status status, Op op) { return nb::cast(outcome_of(status, op)); }

    static nb::object result(const Outcome& out) {
        return out.status == Status::ok ? nb::none() : nb::cast(out);
    }

    std::mutex closing_;
    bool closed_ = false;
    const uint32_t made_after_ = forks();
    std::unique_ptr<Group> group_;
    std::unique_ptr<Mailbox> mailbox_;
    std::unique_ptr<Lane> lane_;
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
    return {rank, size, nanoseconds(timeout_s), cores};
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
                 e.group().wait_attached(nanoseconds(seconds));
             })
        .def("ready", [](Engine& e) { e.group().ready(); })
        .def("pid_of",
             [](Engine& e, int rank) {
                 Group::Visit visit(e.group());
                 return visit ? e.group().pid_of(rank) : 0;
             })
        .def("set_timeout",
             [](Engine& e, double seconds) { e.group().set_timeout(nanoseconds(seconds)); })
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
