// A pending operation, as its caller sees it.
//
// Threads: `finish` is called once, by whoever runs the operation; everything else by anyone at any
// time. What `outcome` and `source` return is fixed once `done` is true.
#pragma once

#include <memory>

#include "flight.h"
#include "futex.h"
#include "types.h"

namespace dure {

class CallQueue;

class Request {
  public:
    Request() = default;
    // Of a collective that is queued in `queue`.
    explicit Request(std::shared_ptr<CallQueue> queue) : queue_(std::move(queue)) {}
    bool done() const { return word_.load(std::memory_order_acquire) != 0; }
    // Wait at most `ns`; returns done(). `aside`: the core of who waits is not free meanwhile, so
    // that the progress thread may not spin on it.
    bool wait(int64_t ns, bool aside = false);
    // Wait without a limit, and run what has not begun. False if the rank was interrupted before.
    bool complete();
    // Nullptr of a message.
    CallQueue* queue() const { return queue_.get(); }
    void finish(Outcome outcome);
    // Write the operation's end into entry `number` of `flight`; now, if it has ended.
    void record(std::shared_ptr<Flight> flight, uint64_t number);

    const Outcome& outcome() const { return outcome_; }
    int source() const { return source_; }
    void set_source(int rank) { source_ = rank; }

  private:
    void write_end();

    const std::shared_ptr<CallQueue> queue_;
    Word word_{0};
    Word waiters_{0};
    int source_ = -1;
    Outcome outcome_;
    std::shared_ptr<Flight> flight_;
    std::atomic<uint64_t> entry_{0};  // of `flight_`, until its end has been written
};

}  // namespace dure
