// Requests: posting them, waiting for them, and the thread that drives those nobody waits for.
#include "mailbox.h"

#include "backoff.h"
#include "quiet_thread.h"

namespace dure {

namespace {

constexpr int64_t kShortSliceNs = 300'000;  // while an offer may have to go through the ring

Outcome refused(Op op) {
    Outcome out;
    out.status = Status::aborted;
    out.op = op;
    return out;
}

std::shared_ptr<Request> refused_request(Op op) {
    auto request = std::make_shared<Request>();
    request->finish(refused(op));
    return request;
}

}  // namespace

Mailbox::Mailbox(Group& group)
    : group_(group),
      sends_(static_cast<size_t>(group.size())),
      arriving_(static_cast<size_t>(group.size())),
      ends_(static_cast<size_t>(group.size())) {}

Mailbox::PostedPtr Mailbox::post(Op op, Block data, DType dtype, int peer, int tag,
                                 std::optional<MessageWay> way) {
    auto request = std::make_shared<Posted>();
    request->op = op;
    request->data = data;
    request->dtype = dtype;
    request->peer = peer;
    request->tag = tag;
    request->number = ++posted_;
    if (stopping_) {
        settle(*request, Status::aborted);
    } else if (group_.broken()) {
        settle(*request, group_.adopt_abort());
    } else if (op == Op::recv) {
        if (data.bytes > kLeastLearnt) request->posted_ns = now_ns();
        post_receive(request);
    } else if (peer == group_.rank()) {
        deliver_to_self(request);
    } else {
        request->way = way ? *way : way_of(data, peer);
        if (request->way.once) request->posted_ns = now_ns();
        sends_[static_cast<size_t>(peer)].push_back(request);
    }
    progress();
    return request;
}

int Mailbox::sender_of(int tag) {
    Group::Visit visit(group_);
    if (!visit) return -1;
    std::lock_guard hold(lock_);
    if (stopping_ || group_.broken()) return -1;
    for (int from = 0; from < group_.size(); from++) {
        if (from != group_.rank()) pull(from);
    }
    follow_all();
    for (const MessagePtr& m : unexpected_) {
        if (m->envelope.tag == tag) return m->source;
    }
    return -1;
}

std::unique_lock<std::mutex> Mailbox::locked() {
    std::unique_lock hold(lock_, std::try_to_lock);
    if (!hold) {
        group_.about_to_wait();
        hold.lock();
    }
    return hold;
}

Outcome Mailbox::send(Block data, DType dtype, int to, int tag) {
    Group::Visit visit(group_);
    if (!visit) return refused(Op::send);
    std::optional<MessageWay> way;
    if (send_at_once(data, dtype, to, tag, way)) return {};
    PostedPtr request;
    {
        const auto hold = locked();
        request = post(Op::send, data, dtype, to, tag, way);
    }
    return drive(request);
}

Outcome Mailbox::receive(Block data, DType dtype, int from, int tag, int* source) {
    Group::Visit visit(group_);
    if (!visit) return refused(Op::recv);
    if (receive_at_once(data, dtype, from, tag)) {
        *source = from;
        return {};
    }
    PostedPtr request;
    {
        const auto hold = locked();
        request = post(Op::recv, data, dtype, from, tag);
    }
    Outcome out = drive(request);
    *source = request->source();
    return out;
}

std::shared_ptr<Request> Mailbox::start_send(Block data, DType dtype, int to, int tag) {
    Group::Visit visit(group_);
    if (!visit) return refused_request(Op::send);
    std::lock_guard hold(lock_);
    return hand_over(post(Op::send, data, dtype, to, tag));
}

std::shared_ptr<Request> Mailbox::start_receive(Block data, DType dtype, int from, int tag) {
    Group::Visit visit(group_);
    if (!visit) return refused_request(Op::recv);
    std::lock_guard hold(lock_);
    return hand_over(post(Op::recv, data, dtype, from, tag));
}

// Wait for `request` on the caller's thread, moving everybody's bytes meanwhile.
Outcome Mailbox::drive(const PostedPtr& request) {
    if (request->done()) return request->outcome();
    group_.about_to_wait();
    const int64_t began = now_ns();
    request->deadline_ns = began + group_.timeout_ns();
    int64_t asked = began;
    Backoff backoff(group_);
    group_.show_core();
    auto shares = [&] { return request->peer == kAnySource || group_.shares_core(request->peer); };
    while (!request->done()) {
        {
            std::lock_guard hold(lock_);
            if (progress()) {
                backoff.restart();
                continue;
            }
        }
        if (backoff.pause(shares)) continue;
        rest(request, now_ns() - began);
        if (const int64_t now = now_ns(); !request->done() && now - asked > 100'000'000) {
            asked = now;
            if (group_.interrupted()) {
                std::lock_guard hold(lock_);
                settle(*request, Status::interrupted);
            }
        }
    }
    return request->outcome();
}

// Sleep until a ring changes, at most a slice; then look for reasons not to go on.
bool Mailbox::rest(const PostedPtr& waiter, int64_t waited_ns) {
    RankBlock& mine = group_.block(group_.rank());
    mine.sleepers.fetch_add(1);
    const uint32_t seen = mine.bell.load();
    std::atomic_thread_fence(std::memory_order_seq_cst);
    bool moved = true;
    int64_t slice = slice_ns(waited_ns);
    try {
        std::lock_guard hold(lock_);
        moved = progress();
        if (!moved) {
            buffer_offers(now_ns());
            examine(waiter);
        }
        if (given_ > 0) slice = kShortSliceNs;
    } catch (const std::exception& error) {  // all that is pending ends with it, the next time
        group_.abort_after(error);
        moved = true;
    }
    if (!moved && !(waiter && waiter->done())) {
        if (waiter) group_.show_asleep();
        futex_wait(mine.bell, seen, slice);
        if (waiter) group_.show_core();
    }
    mine.sleepers.fetch_sub(1);
    return moved;
}

// Move what can be moved now; true if anything was.
bool Mailbox::progress() {
    if (stopping_ || group_.closing() || group_.broken()) return false;
    bool moved = given_ > 0 && serve_all();
    for (int to = 0; to < group_.size(); to++) {
        if (!sends_[static_cast<size_t>(to)].empty()) moved |= push(to);
    }
    bool any = false;
    for (const PostedPtr& r : receives_) any = any || r->peer == kAnySource;
    for (int from = 0; from < group_.size(); from++) {
        bool wanted = any;
        for (const PostedPtr& r : receives_) wanted = wanted || r->peer == from;
        const MessagePtr& message = arriving_[static_cast<size_t>(from)];
        wanted = wanted || (message && message->request);
        for (const MessagePtr& m : ends(from).offered) wanted = wanted || (m && m->request);
        if (wanted && from != group_.rank()) moved |= pull(from);
    }
    return (following_ > 0 && follow_all()) || moved;
}

// ---- requests that nobody waits for -------------------------------------------------------------

std::shared_ptr<Request> Mailbox::hand_over(const PostedPtr& request) {
    if (request->done()) return request;
    request->deadline_ns = now_ns() + group_.timeout_ns();
    handed_.push_back(request);
    if (!thread_.joinable()) {
        thread_ = start_quietly([this] { background(); }, "dure-mailbox");
    }
    work_.notify_one();
    return request;
}

void Mailbox::background() {
    std::unique_lock hold(lock_);
    for (;;) {
        std::erase_if(handed_, [](const PostedPtr& r) { return r->done(); });
        work_.wait(hold, [this] { return stopping_ || !handed_.empty(); });
        if (stopping_) return;
        hold.unlock();
        rest(nullptr, 0);  // the shortest slices: a new request does not wake this thread
        hold.lock();
    }
}

void Mailbox::stop() {
    {
        std::lock_guard hold(lock_);
        if (stopping_) return;
        stopping_ = true;
        fail_all(Status::aborted);
        work_.notify_one();
        RankBlock& mine = group_.block(group_.rank());
        mine.bell.fetch_add(1);
        futex_wake_all(mine.bell);
    }
    if (thread_.joinable()) thread_.join();
}

}  // namespace dure
