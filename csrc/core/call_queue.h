// The asynchronous calls of a channel that have not begun, and the threads that run them.
//
// Note "Who runs an asynchronous call". Handing work over to another thread and hearing of its end
// costs 13 to 28 us, more than a small collective; so whoever waits without a limit runs what has
// not begun, in the order of calls, up to what it waits for. So does a synchronous call behind
// them. The *progress thread* runs what nobody waits for. Most calls are waited for at once, so it
// leaves each alone for kLinger first, large ones for a 50th of the time that they take, and longer
// while the rank is in a large operation on the other channel (core_lock.h). While calls follow
// each other it is not woken for each, but looks after them itself, the more seldom the longer
// others have run them all: after kLinger at first, every kSeldom in the end, by which a call can
// be late when the program changes its ways. It is woken, though, for a large call where it had to
// run the large one before. Without calls it sleeps.
//
// The progress thread never spins, nor gives up its core turn by turn, while its rank computes: it
// sleeps until its peers have come (see `Channel::await_missing`). Where a thread of the rank waits
// for it the core is free, and it waits as any other.
//
// Threads: anything may be called from any thread. Requests share the queue and may outlive the
// channel, whose `stop` ends what is queued and waits for whoever is inside.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "channel.h"
#include "request.h"

namespace dure {

class CallQueue {
  public:
    explicit CallQueue(Channel& channel);

    // A call that has not begun; `call` and `turn` are there until then.
    struct Queued : Request {
        Queued(std::shared_ptr<CallQueue> queue, Call what, Channel::Turn place, bool is_brief)
            : Request(std::move(queue)), call(std::move(what)), brief(is_brief) {
            turn.emplace(std::move(place));
        }
        Call call;
        std::optional<Channel::Turn> turn;
        const bool brief;
        const int64_t queued_ns = now_ns();
        std::chrono::nanoseconds linger() const;  // see kLinger
    };
    // False once stopped: nothing has happened then.
    bool push(std::shared_ptr<Queued> queued);
    // Run the first call if its turn has come.
    bool run_next(bool background = false);
    bool has_next();
    // Run what has not begun until `request` has ended. False if the rank was interrupted before.
    bool complete(const Request& request);
    // Who works on the group of this queue, as `PythonCall` wants to know it.
    const void* subject() const { return subject_; }
    // For whoever waits with a limit, and so does not run anything: see to it that it is run.
    void hurry();
    // A thread of this rank that waits.
    class Waiting {
      public:
        explicit Waiting(CallQueue& queue) : queue_(queue) { queue.waiting_.fetch_add(1); }
        ~Waiting() { queue_.waiting_.fetch_sub(1); }
        Waiting(const Waiting&) = delete;
        Waiting& operator=(const Waiting&) = delete;

      private:
        CallQueue& queue_;
    };
    // Whether a thread of this rank waits, so that its core is free.
    bool awaited() const { return waiting_.load(std::memory_order_relaxed) != 0; }
    void stop();

  private:
    // Keeps the channel while a thread is inside; false once it has stopped.
    class Inside {
      public:
        explicit Inside(CallQueue& queue);
        ~Inside();
        Inside(const Inside&) = delete;
        Inside& operator=(const Inside&) = delete;
        explicit operator bool() const { return channel_ != nullptr; }
        Channel& channel() const { return *channel_; }

      private:
        CallQueue& queue_;
        Channel* channel_;
    };
    void work();

    const void* const subject_;
    std::atomic<int> waiting_{0};
    std::mutex lock_;  // of what follows
    std::condition_variable changed_;
    std::deque<std::shared_ptr<Queued>> calls_;  // by number
    Channel* channel_;                           // nullptr after `stop`
    int inside_ = 0;
    uint64_t pushed_ = 0;
    bool relied_on_ = false;  // the progress thread ran the last call that was not brief
    bool idle_ = false;       // the progress thread sleeps until it is woken
    bool hurried_ = false;    // somebody waits with a limit
    bool stopping_ = false;
    std::thread thread_;
};

// Sleep until something changes that `ready` looks at, at most 100 ms; false if the rank was
// interrupted. A thread that makes `ready` true looks for sleepers after that. The fence orders our
// counting before all that `ready` reads: either that thread sees the sleeper, or we see what it
// has written. (Without it a load with `acquire` may come first on processors that have LDAPR.)
template <typename F>
bool Channel::await_change(F ready) {
    constexpr int64_t kSliceNs = 100'000'000;
    group_.about_to_wait();
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    const uint32_t seen = bell_.load(std::memory_order_seq_cst);
    const bool sleeps = !ready();
    const int64_t until = sleeps ? now_ns() + kSliceNs : 0;
    if (sleeps) futex_wait(bell_, seen, kSliceNs);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return !sleeps || now_ns() < until || !group_.interrupted();
}

}  // namespace dure
