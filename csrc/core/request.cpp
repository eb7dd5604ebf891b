#include "request.h"

#include <optional>

#include "call_queue.h"

namespace dure {

bool Request::complete() { return done() || queue_->complete(*this); }

bool Request::wait(int64_t ns, bool aside) {
    if (done()) return true;
    std::optional<CallQueue::Waiting> waiting;
    if (queue_ && !aside) {
        waiting.emplace(*queue_);
        queue_->hurry();
    }
    const int64_t until = now_ns() + ns;
    while (!done()) {
        int64_t left = until - now_ns();
        if (left <= 0) return false;
        waiters_.fetch_add(1);
        futex_wait(word_, 0, left);
        waiters_.fetch_sub(1);
    }
    return true;
}

void Request::finish(Outcome outcome) {
    outcome_ = std::move(outcome);
    write_end();  // before anyone can know; once more for an entry that comes just now
    word_.store(1);
    if (waiters_.load() != 0) futex_wake_all(word_);
    write_end();
}

// `finish` and `record` may run at once; the one that comes second finds both the end and the
// entry, and the exchange lets only one of them write.
void Request::record(std::shared_ptr<Flight> flight, uint64_t number) {
    flight_ = std::move(flight);
    entry_.store(number);
    if (word_.load() != 0) write_end();
}

void Request::write_end() {
    if (uint64_t number = entry_.exchange(0)) flight_->end(number, outcome_.status);
}

}  // namespace dure
