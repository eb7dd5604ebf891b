// The order of a channel's calls, and the asynchronous ones that have not begun.
#include "call_queue.h"

namespace dure {

Channel::Channel(Group& group, int index)
    : group_(group),
      index_(index),
      rank_(group.rank()),
      size_(group.size()),
      ranks_(&group.block(0)),
      staging_(group.base() + group.layout().staging +
               static_cast<size_t>(index * group.size()) * kBuffers * kStageBytes),
      tables_(group.base() + group.layout().tables +
              static_cast<size_t>(index * group.size()) * 2 * group.layout().table_stride),
      chunk_(group.chunk()),
      queue_(std::make_shared<CallQueue>(*this)) {}

void Channel::stop() { queue_->stop(); }

// Those before us end: an operation waits no longer than its timeout, and not at all on a broken
// group. What of them nobody has begun, we run. Ctrl-C breaks the group, since the memory of this
// call is its caller's.
void Channel::await_turn(uint32_t number) {
    if (has_come(number)) return;
    group_.about_to_wait();
    const CallQueue::Waiting waiting(*queue_);
    bool asks = true;
    while (!has_come(number)) {
        if (queue_->run_next()) continue;
        const bool undisturbed =
            await_change([&] { return has_come(number) || queue_->has_next(); });
        if (undisturbed || !asks) continue;
        asks = false;
        const Group::Visit visit(group_);
        if (!visit) continue;  // the handler closed the group
        Outcome out;
        out.status = Status::interrupted;
        out.channel = index_;
        out.peer = rank_;
        group_.abort(std::move(out));
    }
}

// Either a sleeper sees the new number, or we see the sleeper.
void Channel::pass_turn(uint32_t number) {
    served_.store(number + 1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) ring();
}

void Channel::ring() {
    bell_.fetch_add(1);
    futex_wake_all(bell_);
}

// Run one collective when its turn has come, counted, and not on a broken group. Whatever thread it
// is, an exception breaks the group: peers must not wait for a rank that has given up.
template <typename F>
Status Channel::guarded(const Turn& turn, F collective) {
    turn.wait();
    const Group::Visit visit(group_);
    if (!visit) return Status::aborted;
    try {
        return unless_broken(turn, collective);
    } catch (const std::exception& error) {
        return group_.abort_after(error, index_, turn.number());
    }
}

template <typename F>
Status Channel::unless_broken(const Turn& turn, F& collective) {
    if (group_.failed()) return group_.failure().status;
    if (group_.broken()) return group_.adopt_abort();
    if (group_.threads_seen() != 0 && ends_by_crossing(turn.number())) {
        return group_.abort_crossing();
    }
    const Status status = collective();
    if (group_.threads_seen() == 0 || !ends_by_crossing(turn.number() + 1)) return status;
    // The second thread may have been refused after the headers were compared. They are still
    // valid, since no peer can finish the next operation without this rank.
    const Status met = status == Status::ok ? check_threads() : status;
    group_.abort_crossing();
    return met;
}

// ---- one large operation at a time (core_lock.h) ------------------------------------------------

// What a call takes; nullptr of a small one.
CoreLock* Channel::lock_for(const Call& call) const {
    return call.bytes_touched() < kLargeBytes ? nullptr : group_.core_lock();
}

void Channel::take_core() {
    group_.about_to_wait();
    core_->take();
    holds_core_ = true;
}

void Channel::give_up_core() {
    if (!holds_core_) return;
    holds_core_ = false;
    core_->give_up();
}

// Has the lock for an operation, except while that sleeps. What the progress thread runs meanwhile
// on the other channel may know that this thread waits.
class Channel::HeldCore {
  public:
    HeldCore(Channel& channel, CoreLock* core) : channel_(channel) {
        channel.core_ = core;
        if (!core) return;
        if (!channel.background_) waiting_.emplace(*channel.queue_);
        channel.take_core();
    }
    ~HeldCore() {
        channel_.give_up_core();
        channel_.core_ = nullptr;
    }
    HeldCore(const HeldCore&) = delete;
    HeldCore& operator=(const HeldCore&) = delete;

  private:
    Channel& channel_;
    std::optional<CallQueue::Waiting> waiting_;
};

Status Channel::collective(const Call& call) {
    const HeldCore held(*this, lock_for(call));
    return carry_out(call);
}

Status Channel::run(const Call& call, Turn turn) {
    return guarded(turn, [&] { return collective(call); });
}

std::shared_ptr<HeapMemory> Channel::host_shared_empty(size_t bytes, Status& status,
                                                       const Site* site, Turn turn) {
    std::shared_ptr<HeapMemory> made;
    status = guarded(turn, [&] {
        Status inner = Status::ok;
        made = allocate_node_shared(bytes, inner, site);
        return inner;
    });
    return status == Status::ok ? made : nullptr;
}

// ---- asynchronous calls -------------------------------------------------------------------------

std::shared_ptr<Request> Channel::start(Call call, Turn turn, bool brief) {
    auto request =
        std::make_shared<CallQueue::Queued>(queue_, std::move(call), std::move(turn), brief);
    Status status = Status::aborted;
    try {
        if (queue_->push(request)) return request;
    } catch (const std::exception& error) {  // its thread could not be started
        const Group::Visit visit(group_);
        if (visit) status = group_.abort_after(error, index_, request->turn->number());
    }
    request->turn.reset();
    request->finish(group_.outcome_of(status, request->call.op));
    return request;
}

Status Channel::run_queued(const Call& call, const Turn& turn, bool background) {
    return guarded(turn, [&] {
        background_ = background;
        try {
            const Status status = collective(call);
            background_ = false;
            return status;
        } catch (...) {
            background_ = false;
            throw;
        }
    });
}

}  // namespace dure
