// See the note "Who runs an asynchronous call" in call_queue.h.
#include "call_queue.h"

#include <algorithm>
#include <chrono>

#include "quiet_thread.h"

namespace dure {

namespace {

constexpr std::chrono::microseconds kLinger{50}, kLongestLinger{250}, kSeldom{1600};
constexpr std::chrono::milliseconds kLongestDefer{100};  // behind large operations

}  // namespace

CallQueue::Inside::Inside(CallQueue& queue) : queue_(queue), channel_(nullptr) {
    std::lock_guard hold(queue.lock_);
    channel_ = queue.channel_;
    if (channel_) queue.inside_++;
}

CallQueue::Inside::~Inside() {
    if (!channel_) return;
    std::lock_guard hold(queue_.lock_);
    if (--queue_.inside_ == 0 && queue_.stopping_) queue_.changed_.notify_all();
}

// How long the progress thread leaves it alone: of a long call, a 50th of its time at most.
std::chrono::nanoseconds CallQueue::Queued::linger() const {
    return std::min<std::chrono::nanoseconds>(
        kLinger + std::chrono::nanoseconds(call.bytes_touched() / 512), kLongestLinger);
}

CallQueue::CallQueue(Channel& channel) : subject_(&channel.group_), channel_(&channel) {}

void CallQueue::hurry() {
    std::lock_guard hold(lock_);
    if (calls_.empty()) return;
    hurried_ = true;
    changed_.notify_one();
}

bool CallQueue::push(std::shared_ptr<Queued> queued) {
    std::lock_guard hold(lock_);
    if (stopping_) return false;
    // First, as it may fail: then nothing has been started.
    if (!thread_.joinable()) thread_ = start_quietly([this] { work(); }, "dure-progress");
    const bool wake = idle_ || (relied_on_ && !queued->brief);
    // Numbers are taken before we come here, so a later one may come first.
    auto place = calls_.end();
    while (place != calls_.begin() && queued->turn->before(*(*std::prev(place))->turn)) --place;
    calls_.insert(place, std::move(queued));
    pushed_++;
    if (wake) changed_.notify_one();
    if (channel_->sleepers_.load(std::memory_order_seq_cst) != 0) channel_->ring();
    return true;
}

bool CallQueue::has_next() {
    std::lock_guard hold(lock_);
    return channel_ && !calls_.empty() && calls_.front()->turn->come();
}

bool CallQueue::run_next(bool background) {
    std::unique_lock hold(lock_);
    if (!channel_ || calls_.empty() || !calls_.front()->turn->come()) return false;
    const std::shared_ptr<Queued> queued = std::move(calls_.front());
    calls_.pop_front();
    inside_++;
    if (!queued->brief) relied_on_ = background;
    Channel& channel = *channel_;
    hold.unlock();
    if (!queued->brief) channel.group_.about_to_wait();
    const Status status = channel.run_queued(queued->call, *queued->turn, background);
    Outcome out;
    try {
        if (status != Status::ok) out = channel.group_.outcome_of(status, queued->call.op);
    } catch (const std::exception&) {  // no memory left for its texts
        out.status = status;
    }
    queued->finish(std::move(out));
    queued->turn.reset();
    hold.lock();
    if (--inside_ == 0 && stopping_) changed_.notify_all();
    return true;
}

bool CallQueue::complete(const Request& request) {
    const Inside inside(*this);
    if (!inside) return true;  // all has ended
    const Waiting waiting(*this);
    while (!request.done()) {
        if (run_next()) continue;
        if (!inside.channel().await_change([&] { return request.done() || has_next(); }))
            return false;
    }
    return true;
}

void CallQueue::work() {
    std::unique_lock hold(lock_);
    uint64_t looked_after = 0;  // calls pushed when we looked last
    std::chrono::nanoseconds pause = kLinger;
    const auto look_in = [&](std::chrono::nanoseconds time) {
        looked_after = pushed_;
        changed_.wait_for(hold, time);
    };
    for (;;) {
        if (calls_.empty()) {
            hurried_ = false;
            if (stopping_) return;
            if (looked_after != pushed_) {
                look_in(pause);
                pause = std::min<std::chrono::nanoseconds>(2 * pause, kSeldom);
            } else {
                idle_ = true;
                changed_.wait(hold);
                idle_ = false;
                pause = kLinger;
            }
            continue;
        }
        const std::chrono::nanoseconds age{now_ns() - calls_.front()->queued_ns};
        const std::chrono::nanoseconds linger = calls_.front()->linger();
        if (age < linger && !hurried_ && !stopping_) {
            look_in(linger - age);
            continue;
        }
        Channel& channel = *channel_;
        CoreLock* const core = channel.lock_for(calls_.front()->call);
        // Who works mostly waits for this call next, and then runs it.
        if (core && core->held() && age < kLongestDefer && !hurried_ && !stopping_) {
            hold.unlock();
            core->await_change();
            hold.lock();
            look_in(kLinger);
            continue;
        }
        pause = kLinger;
        hold.unlock();
        if (!run_next(true)) channel.await_change([this] { return has_next(); });
        hold.lock();
    }
}

void CallQueue::stop() {
    std::unique_lock hold(lock_);
    stopping_ = true;
    changed_.notify_all();
    hold.unlock();
    // The group is closed: what is still queued ends with `aborted` as soon as it is run.
    if (thread_.joinable()) thread_.join();
    hold.lock();
    changed_.wait(hold, [this] { return inside_ == 0; });
    channel_ = nullptr;
}

}  // namespace dure
