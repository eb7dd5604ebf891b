#include "engine.h"

#include <nanobind/stl/shared_ptr.h>
#include <pthread.h>

#include <algorithm>

#include "whereabouts.h"

namespace nb = nanobind;

namespace dure {

namespace {

Outcome outcome_of(Status status, Op op) {
    Outcome out;
    out.status = status;
    out.op = op;
    return out;
}

nb::object result(const Outcome& out) {
    return out.status == Status::ok ? nb::none() : nb::cast(out);
}

// A tensor whose storage was resized to nothing still has its shape.
bool lacks_memory(const Block& block) { return block.data == nullptr && block.bytes != 0; }

bool lacks_memory(const Call& call) {
    const auto lacks = [](const Block& b) { return lacks_memory(b); };
    return std::any_of(call.inputs.begin(), call.inputs.end(), lacks) ||
           std::any_of(call.outputs.begin(), call.outputs.end(), lacks);
}

Outcome without_memory(Op op) {
    Outcome out = outcome_of(Status::usage, op);
    out.detail = "a tensor has a shape, but no memory";
    return out;
}

// What the recorder tells of a call's size: this rank's input, its output where it has none.
size_t bytes_of(const Call& call) {
    const auto& list = call.inputs.empty() ? call.outputs : call.inputs;
    size_t bytes = 0;
    for (const Block& b : list) bytes += b.bytes;
    return bytes;
}

}  // namespace

Engine::Engine(std::unique_ptr<Group> group)
    : group_(std::move(group)),
      mailbox_(std::make_unique<Mailbox>(*group_)),
      lane_(std::make_unique<Lane>(*group_)) {
    first_look();
    group_->set_interrupt(&PythonCall::interrupted);
    group_->set_about_to_wait(&PythonCall::about_to_wait);
    // The thread that makes a rank's group is the rank's own.
    group_->set_where([rank = PyThread_get_thread_ident()] { return python_line_of(rank); });
}

Engine::~Engine() {
    if (!forked()) {
        close();
        return;
    }
    // The rank lives on in the parent; its threads, and whoever held a lock, do not exist here.
    static_cast<void>(lane_.release());
    static_cast<void>(mailbox_.release());
    static_cast<void>(group_.release());
}

std::atomic<uint32_t>& Engine::forks() {
    static std::atomic<uint32_t> count{0};
    static const int watched = pthread_atfork(nullptr, nullptr, [] { forks().fetch_add(1); });
    static_cast<void>(watched);
    return count;
}

uint64_t Engine::note(const Call& call, bool async) {
    return flight_->begin(
        {call.op, call.dtype, call.reduction, async, call.root, 0, bytes_of(call), call.site});
}

uint64_t Engine::note(const Message& message, Block block, DType dtype, bool async) {
    return flight_->begin({message.op, dtype, Reduction::none, async, message.peer, message.tag,
                           block.bytes, call_site()});
}

nb::object Engine::failed(Status status, Op op) { return nb::cast(group_->outcome_of(status, op)); }

nb::object Engine::run(Call call, bool async) {
    if (Status s = refusal(); s != Status::ok) return nb::cast(outcome_of(s, call.op));
    if (lacks_memory(call)) return nb::cast(without_memory(call.op));
    call.site = call_site();
    const uint64_t entry = note(call, async);
    if (!async && lane_->idle()) {
        const Status s = call_without_gil(group_.get(), [&] {
            const Status ended = group_->run(call);
            flight_->end(entry, ended);
            return ended;
        });
        return s == Status::ok ? nb::none() : failed(s, call.op);
    }
    std::shared_ptr<Ticket> ticket = lane_->start(std::move(call));
    ticket->record(flight_, entry);
    if (async) return nb::cast(ticket);
    wait_or_break(*ticket);
    return result(ticket->outcome());
}

nb::object Engine::send(Block block, DType dtype, int to, int tag, bool async) {
    if (forked()) return nb::cast(outcome_of(Status::forked, Op::send));
    if (lacks_memory(block)) return nb::cast(without_memory(Op::send));
    Mailbox* box = mailbox_.get();
    const uint64_t entry = note({Op::send, to, tag}, block, dtype, async);
    if (async) {
        auto ticket = call_without_gil(box, [&] { return box->start_send(block, dtype, to, tag); });
        ticket->record(flight_, entry);
        return nb::cast(ticket);
    }
    Outcome out = call_without_gil(box, [&] {
        Outcome ended = box->send(block, dtype, to, tag);
        flight_->end(entry, ended.status);
        return ended;
    });
    return result(out);
}

std::shared_ptr<Ticket> Engine::receive(Block block, DType dtype, int from, int tag, bool async) {
    Mailbox* box = mailbox_.get();
    auto ticket = std::make_shared<Ticket>();
    if (forked()) {
        ticket->finish(outcome_of(Status::forked, Op::recv));
        return ticket;
    }
    if (lacks_memory(block)) {
        ticket->finish(without_memory(Op::recv));
        return ticket;
    }
    const uint64_t entry = note({Op::recv, from, tag}, block, dtype, async);
    if (async) {
        ticket = call_without_gil(box, [&] { return box->start_receive(block, dtype, from, tag); });
        ticket->record(flight_, entry);
        return ticket;
    }
    int source = -1;
    Outcome out = call_without_gil(box, [&] {
        Outcome ended = box->receive(block, dtype, from, tag, &source);
        flight_->end(entry, ended.status);
        return ended;
    });
    ticket->set_source(source);
    ticket->finish(std::move(out));
    return ticket;
}

nb::object Engine::shared_empty(size_t bytes, bool common) {
    const Op op = common ? Op::host_shared_empty : Op::shared_empty;
    if (Status s = refusal(); s != Status::ok) return nb::cast(outcome_of(s, op));
    Call call;
    call.op = op;
    call.site = call_site();
    const uint64_t entry = note(call, false);
    Status s = Status::ok;
    auto block = call_without_gil(group_.get(), [&] {
        auto made = group_->shared_empty(bytes, s, call.site, common);
        flight_->end(entry, s);
        return made;
    });
    return block ? nb::cast(block) : failed(s, op);
}

// From a signal handler that interrupted a call of ours, this only leaves: the interrupted call
// still needs the segment. The next `close`, or the destructor, does the rest.
void Engine::close() {
    if (forked()) return;
    if (PythonCall::inside(group_.get()) || PythonCall::inside(mailbox_.get())) {
        return group_->leave();
    }
    const WithoutGil release;
    std::lock_guard hold(closing_);
    if (closed_) return;
    closed_ = true;
    group_->close();
    mailbox_->stop();
    lane_->stop();
    group_->release();
}

// Wait for a queued operation of a synchronous call. Its memory is the caller's, so where a
// signal handler raises, the operation must end before we return: the group is broken.
void Engine::wait_or_break(Ticket& ticket) {
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

}  // namespace dure
