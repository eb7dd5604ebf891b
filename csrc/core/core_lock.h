// Which of a rank's two channels moves large data.
//
// Note "Large operations". Where a rank has no second core for its second channel, two large
// operations beside each other took up to 10 % longer than one after the other: their threads meet
// on one core, while on another nobody does what they wait for (docs/decisions/0007-channels.md).
// So a rank works on one large operation at a time. It takes this lock before it begins and holds
// it while it copies and while it looks for its peers. Small operations do not ask for it.
//
// Nobody waits for ever, in whatever order the ranks call, and though they agree on none. A rank
// that sleeps until its peers come gives the lock up, at once or after a few milliseconds
// (`Channel::patience_ns`), and takes it again when they have come. So whoever holds it works, or
// waits for a limited time; whoever wants it gets it in the order of asking; and to wait for a
// peer's arrival nobody needs it. Two ranks that each began what the other has not would give it up
// again and again at the same time: so the second channel has less patience than the first.
//
// The progress thread leaves a large call in its queue while the lock is held: who holds it mostly
// waits for that call next, and then runs it where it is, without waking another thread.
//
// A lock is a rank's in one group; threads of several groups do not see each other.
#pragma once

#include "futex.h"

namespace dure {

class CoreLock {
  public:
    void take() {
        const uint32_t mine = issued_.fetch_add(1);
        for (uint32_t now; (now = served_.load()) != mine;) futex_wait(served_, now, kSliceNs);
    }
    // Either a sleeper sees the new number, or we see the sleeper.
    void give_up() {
        served_.fetch_add(1);
        if (held() || watchers_.load() != 0) futex_wake_all(served_);
    }
    bool held() const { return issued_.load() != served_.load(); }
    // Sleep until its holder gives it up, if somebody holds it; for no reason also earlier.
    void await_change() {
        watchers_.fetch_add(1);
        const uint32_t seen = served_.load();
        if (issued_.load() != seen) futex_wait(served_, seen, kSliceNs);
        watchers_.fetch_sub(1);
    }

  private:
    static constexpr int64_t kSliceNs = 100'000'000;

    Word issued_{0};  // numbers of those who asked
    Word served_{0};  // who holds it
    Word watchers_{0};
};

}  // namespace dure
