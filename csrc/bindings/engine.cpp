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
    : group_(std::move(group)), mailbox_(std::make_unique<Mailbox>(*group_)) {
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
    static_cast<void>(mailbox_.release());
    static_cast<void>(group_.release());
}

std::atomic<uint32_t>& Engine::forks() {
    static std::atomic<uint32_t> count{0};
    static const int watched = pthread_atfork(nullptr, nullptr, [] { forks().fetch_add(1); });
    static_cast<void>(watched);
    return count;
}

uint64_t Engine::note(int channel, const Channel::Turn& turn, const Call& call, bool async) {
    return flight_->begin({call.op, call.dtype, call.reduction, async,
                           static_cast<uint8_t>(channel), turn.number(), call.root, 0,
                           bytes_of(call), call.site});
}

uint64_t Engine::note(const Message& message, Block block, DType dtype, const Site* site,
                      bool async) {
    return flight_->begin({message.op, dtype, Reduction::none, async, 0, 0, message.peer,
                           message.tag, block.bytes, site});
}

// Refuse the call of a second thread, and let the group be broken after the first thread's call.
Outcome Engine::second_thread(int channel, const Site* first, const Call& call) {
    const auto name = [](const std::string* thread) {
        return thread ? *thread : std::string("MainThread");
    };
    Outcome out = outcome_of(Status::usage, call.op);
    out.detail = "two threads called collectives of one channel at the same time: " +
                 name(inside_[channel].thread) + " is inside a call at " + first->text + ", and " +
                 name(call.thread) + " called at " + call.site->text;
    const Group::Visit visit(*group_);
    if (visit) {
        // The first thread's call is the last one that has a number.
        group_->note_crossing(channel, group_->channel(channel).issued(),
                              call.thread ? *call.thread : "", out.detail);
    }
    return out;
}

nb::object Engine::enter(int channel) {
    if (Status s = refusal(); s != Status::ok) return nb::cast(outcome_of(s, Op::none));
    Call call;
    call.site = call_site();
    call.thread = thread_name();
    if (const Site* first = other_thread(channel)) {
        return nb::cast(second_thread(channel, first, call));
    }
    Inside& inside = inside_[channel];
    if (!inside.empty()) return nb::borrow(Py_False);
    inside.begin(call);
    return nb::borrow(Py_True);
}

nb::object Engine::failed(Status status, Op op) { return nb::cast(group_->outcome_of(status, op)); }

void Engine::raise(const Outcome& outcome) {
    int pid = 0;
    if (outcome.peer >= 0) {
        const Group::Visit visit(*group_);
        if (visit) pid = group_->pid_of(outcome.peer);
    }
    const nb::object error =
        error_(nb::cast(outcome), pid, static_cast<double>(group_->timeout_ns()) * 1e-9);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    throw nb::python_error();
}

// Release the tensors of calls that have ended, even if Python never waits for them: a dropped
// tensor may refer to its Request, in a cycle that the garbage collector cannot see. Their
// destructors may call this object again.
void Engine::release_ended() {
    const auto first = std::partition(pending_.begin(), pending_.end(),
                                      [](const auto& call) { return !call->request->done(); });
    const std::vector<std::shared_ptr<PendingCall>> ended(first, pending_.end());
    pending_.erase(first, pending_.end());
    for (const auto& call : ended) {
        call->one.reset();
        call->other.reset();
    }
}

// Hand out a Request, and hold on to what it works on, though it be dropped.
nb::object Engine::started(const std::shared_ptr<Request>& request, const Site* site,
                           nb::handle one, nb::handle other) {
    if (pending_.size() >= sweep_at_) {
        release_ended();
        sweep_at_ = 2 * pending_.size() + 16;
    }
    auto call = std::make_shared<PendingCall>(request, site, nb::borrow(one), nb::borrow(other));
    pending_.push_back(call);
    return nb::cast(PythonRequest(std::move(call), *this));
}

nb::object Engine::run(int channel, Call call, bool async, nb::handle keep) {
    if (Status s = refusal(); s != Status::ok) return nb::cast(outcome_of(s, call.op));
    if (lacks_memory(call)) return nb::cast(without_memory(call.op));
    const Site* const site = call.site = call_site();
    call.thread = thread_name();
    if (const Site* first = other_thread(channel)) {
        return nb::cast(second_thread(channel, first, call));
    }
    Channel& on = group_->channel(channel);
    Channel::Turn turn(on);
    const uint64_t entry = note(channel, turn, call, async);
    if (async) {
        const bool brief = bytes_of(call) <= kBriefBytes;
        std::shared_ptr<Request> request = on.start(std::move(call), std::move(turn), brief);
        request->record(flight_, entry);
        return started(request, site, keep);
    }
    Stay stay(inside_[channel], call);
    const Status s = call_without_gil(group_.get(), [&] {
        const Status ended = on.run(call, std::move(turn));
        flight_->end(entry, ended);
        stay.end();
        return ended;
    });
    return s == Status::ok ? nb::none() : failed(s, call.op);
}

nb::object Engine::send(Block block, DType dtype, int to, int tag, bool async, nb::handle keep) {
    if (forked()) return nb::cast(outcome_of(Status::forked, Op::send));
    if (lacks_memory(block)) return nb::cast(without_memory(Op::send));
    Mailbox* box = mailbox_.get();
    const Site* const site = call_site();
    const uint64_t entry = note({Op::send, to, tag}, block, dtype, site, async);
    if (async) {
        auto request =
            call_without_gil(box, [&] { return box->start_send(block, dtype, to, tag); });
        request->record(flight_, entry);
        return started(request, site, keep);
    }
    Outcome out = call_without_gil(box, [&] {
        Outcome ended = box->send(block, dtype, to, tag);
        flight_->end(entry, ended.status);
        return ended;
    });
    return result(out);
}

nb::object Engine::receive(Block block, DType dtype, int from, int tag, bool async,
                           nb::handle keep) {
    Mailbox* box = mailbox_.get();
    const Site* const site = call_site();
    auto request = std::make_shared<Request>();
    const auto finished = [&](Outcome outcome) {
        request->finish(std::move(outcome));
        return started(request, site, nb::none());
    };
    if (forked()) return finished(outcome_of(Status::forked, Op::recv));
    if (lacks_memory(block)) return finished(without_memory(Op::recv));
    const uint64_t entry = note({Op::recv, from, tag}, block, dtype, site, async);
    if (async) {
        request =
            call_without_gil(box, [&] { return box->start_receive(block, dtype, from, tag); });
        request->record(flight_, entry);
        return started(request, site, keep);
    }
    int source = -1;
    Outcome out = call_without_gil(box, [&] {
        Outcome ended = box->receive(block, dtype, from, tag, &source);
        flight_->end(entry, ended.status);
        return ended;
    });
    request->set_source(source);
    return finished(std::move(out));
}

nb::object Engine::host_shared_empty(size_t bytes) {
    constexpr Op op = Op::host_shared_empty;
    if (Status s = refusal(); s != Status::ok) return nb::cast(outcome_of(s, op));
    Call call;
    call.op = op;
    call.site = call_site();
    call.thread = thread_name();
    if (const Site* first = other_thread(0)) return nb::cast(second_thread(0, first, call));
    Channel& on = group_->channel(0);
    Channel::Turn turn(on);
    const uint64_t entry = note(0, turn, call, false);
    Stay stay(inside_[0], call);
    Status s = Status::ok;
    auto memory = call_without_gil(group_.get(), [&] {
        auto made = on.host_shared_empty(bytes, s, call.site, std::move(turn));
        flight_->end(entry, s);
        stay.end();
        return made;
    });
    return memory ? nb::cast(memory) : failed(s, op);
}

// From a signal handler that interrupted a call of ours, this only leaves: the interrupted call
// still needs the segment. The next `close`, or the destructor, does the rest.
void Engine::close() {
    if (forked()) return;
    if (PythonCall::inside(group_.get()) || PythonCall::inside(mailbox_.get())) {
        return group_->leave();
    }
    {
        const WithoutGil release;
        std::lock_guard hold(closing_);
        if (closed_) return;
        closed_ = true;
        group_->close();
        mailbox_->stop();
        group_->release();
    }
    release_ended();
}

}  // namespace dure
