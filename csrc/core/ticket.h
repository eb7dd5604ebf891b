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

class Ticket {
  public:
    bool done() const { return word_.load(std::memory_order_acquire) != 0; }
    // Wait at most `ns`; returns done().
    bool wait(int64_t ns);
    void finish(Outcome outcome);
    // Write the operation's end into entry `number` of `flight`; now, if it has ended.
    void record(std::shared_ptr<Flight> flight, uint64_t number);

    const Outcome& outcome() const { return outcome_; }
    int source() const { return source_; }
    void set_source(int rank) { source_ = rank; }

  private:
    void write_end();

    Word word_{0};
    Word waiters_{0};
    int source_ = -1;
    Outcome outcome_;
    std::shared_ptr<Flight> flight_;
    std::atomic<uint64_t> entry_{0};  // of `flight_`, until its end has been written
};

}  // namespace dure
