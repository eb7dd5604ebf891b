// How a rank passes the time between two looks, before it sleeps: the first two stages of
// "Waiting" (barrier.cpp).
//
// Where each rank has a core and no rank that is waited for shares this one, yielding has no point:
// it would only lend the core to another program, which keeps it for milliseconds. Where one does,
// and another program is there too, the program gets what both give up: a yield that took that long
// is followed by a time in which this rank rather sleeps, because whoever wakes goes first
// (Group::meet_contention).
//
// Where ranks outnumber cores, a rank gives up its core after kStretchNs of spinning although
// nobody who is waited for seems to share it. What is known of the others' cores is where they last
// ran: one that the kernel has moved here, or woken here, has not run yet, and waits for us to go.
// A needless yield costs less than half a microsecond; a stretch of 20 us made an operation of 8
// ranks on 2 cores take three times as long (docs/decisions/0002-waiting.md).
//
// The clock is read once in kLooks looks, and once a yield.
#pragma once

#include <sched.h>

#include <algorithm>

#include "group.h"

namespace dure {

constexpr int64_t kShortestSliceNs = 4'000'000, kLongestSliceNs = 20'000'000;

// How long a rank that has waited for `waited_ns` sleeps until it next checks for a reason to stop
// waiting. A peer's death is noticed up to that much later. Checks become rarer with the wait:
// every 4 ms, they take 3 ms of a core per second.
inline int64_t slice_ns(int64_t waited_ns) {
    return std::clamp(waited_ns / 64, kShortestSliceNs, kLongestSliceNs);
}

class Backoff {
  public:
    explicit Backoff(Group& group) : group_(group) {}

    // After a look in vain. `shares_core()` tells whether a rank that is waited for was last seen
    // on this core. False: look once more, then sleep.
    template <typename Shares>
    bool pause(Shares shares_core) {
        if (looks_++ % kLooks == 0) {
            if (looks_ > 1) read_clock();
            shares_ = shares_core();
            spins_ = !shares_ && may_spin();
        }
        if (!spins_) {
            tell();
            return (shares_ || group_.oversubscribed()) && yield();
        }
        relax();
        return true;
    }

    // Something has come, though not all: be patient anew.
    void restart() {
        began_ns_ = 0;
        looks_ = 0;
    }

    // When the wait began, roughly.
    int64_t began_ns() {
        if (began_ns_ == 0) read_clock();
        return began_ns_;
    }

  private:
    static constexpr uint32_t kLooks = 32;
    static constexpr int64_t kBriefNs = 3'000;
    static constexpr int64_t kAwakeNs = 200'000;      // then sleeping is cheap by comparison
    static constexpr int64_t kStretchNs = 2'000;      // of spinning where ranks outnumber cores
    static constexpr int64_t kContendedNs = 500'000;  // a yield that long met no rank of ours

    void read_clock() {
        now_ns_ = now_ns();
        if (began_ns_ == 0) began_ns_ = yielded_ns_ = now_ns_;
        if (now_ns_ - began_ns_ >= kBriefNs) tell();
    }

    // This call is not brief: an answer from a distant core comes sooner than Python's lock is
    // given away and taken back.
    void tell() {
        if (told_) return;
        told_ = true;
        group_.about_to_wait();
    }

    bool may_spin() const {
        if (began_ns_ == 0) return true;
        if (group_.oversubscribed() && now_ns_ - yielded_ns_ >= kStretchNs) return false;
        return now_ns_ - began_ns_ < kAwakeNs;
    }

    bool yield() {
        if (began_ns_ == 0) read_clock();
        const int64_t before = now_ns_;
        if (before - began_ns_ >= kAwakeNs || before < group_.contended_until_ns()) return false;
        sched_yield();
        group_.show_core();
        read_clock();
        if (now_ns_ - before > kContendedNs) group_.meet_contention(now_ns_);
        yielded_ns_ = now_ns_;
        looks_ = 0;
        if (shares_) group_.migrate(now_ns_);
        return true;
    }

    Group& group_;
    uint32_t looks_ = 0;
    bool spins_ = false, shares_ = false, told_ = false;
    int64_t began_ns_ = 0, now_ns_ = 0, yielded_ns_ = 0;
};

}  // namespace dure
