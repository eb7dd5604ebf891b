// How a rank passes the time between two looks, before it sleeps: the first two stages of
// "Waiting" (sync.cpp).
//
// The clock is read once in kLooks looks, and once a yield.
#pragma once

#include <sched.h>

#include <atomic>

#include "futex.h"

namespace dure {

// What is known about the cores that a group's ranks run on.
struct Cores {
    explicit Cores(bool crowded) : crowded(crowded) {}
    const bool crowded;                          // fewer cores than ranks
    std::atomic<int64_t> contended_until_ns{0};  // someone else computes on them
};

class Patience {
  public:
    explicit Patience(Cores& cores) : cores_(cores) {}

    // After a look in vain. `shares_core()` tells whether a rank that is waited for was last seen
    // on this core; `moved()` is called when this thread may be on another core than before. False:
    // look once more, then sleep.
    template <typename Shares, typename Moved>
    bool pause(Shares shares_core, Moved moved) {
        if (looks_++ % kLooks == 0) {
            if (looks_ > 1) read_clock();
            spins_ = may_spin() && !shares_core();
        }
        if (spins_) {
            relax();
            return true;
        }
        if (!yield()) return false;
        moved();
        return true;
    }

    // Something has come, though not all: be patient anew.
    void restart() { began_ns_ = 0, looks_ = 0; }

    // When the wait began, roughly.
    int64_t began_ns() {
        if (began_ns_ == 0) read_clock();
        return began_ns_;
    }

  private:
    static constexpr uint32_t kLooks = 32;
    static constexpr int64_t kSpinNs = 100'000;    // as long as a chunk's copy, or several wake-ups
    static constexpr int64_t kStretchNs = 20'000;  // of spinning where others want the core
    static constexpr int64_t kYieldNs = 200'000;   // then sleeping is cheap by comparison
    static constexpr int64_t kContendedNs = 100'000;  // a yield that long met no small operation
    static constexpr int64_t kContentionNs = 5'000'000;

    void read_clock() {
        now_ns_ = now_ns();
        if (began_ns_ == 0) began_ns_ = yielded_ns_ = now_ns_;
    }

    bool may_spin() const {
        return began_ns_ == 0 || (now_ns_ - began_ns_ < kSpinNs &&
                                  (!cores_.crowded || now_ns_ - yielded_ns_ < kStretchNs));
    }

    bool yield() {
        if (began_ns_ == 0) read_clock();
        const int64_t before = now_ns_;
        if (before - began_ns_ >= kYieldNs || before < cores_.contended_until_ns.load())
            return false;
        sched_yield();
        read_clock();
        if (now_ns_ - before > kContendedNs) {
            cores_.contended_until_ns.store(now_ns_ + kContentionNs);
        }
        yielded_ns_ = now_ns_;
        looks_ = 0;
        return true;
    }

    Cores& cores_;
    uint32_t looks_ = 0;
    bool spins_ = false;
    int64_t began_ns_ = 0, now_ns_ = 0, yielded_ns_ = 0;
};

}  // namespace dure
