// Which of a rank's channels moves large data.
//
// Note "Large operations". Where a rank has no second core for its second channel, two large
// operations side by side take longer than one after the other: up to 10 % (docs/log.md, "Two
// channels, one core"), because the kernel puts two threads on one core while another core waits
// for what they do. So a rank moves the data of one large operation at a time. It takes this lock
// before it begins, and holds it while it copies, and while it looks for its peers. Small ones do
// not ask for it.
//
// It depends on nobody else's order: a rank that sleeps until its peers come gives the lock up, and
// takes it again when all have come. Who holds it thus either works or waits for a short, limited
// time (`Channel::await_missing`), and who wants it gets it in the order of asking; so nobody waits
// for ever, whatever order the ranks call in. Two ranks of which each is in an operation that the
// other has not begun do not give up by turns either: the second channel gives way at once where
// the first wants the lock, and the first only when it goes to sleep.
//
// The progress thread leaves a large call in its queue while the lock is held: who holds it mostly
// waits for that call next, and then runs it on the core where it is.
#pragma once

#include "futex.h"

namespace dure {

class CoreLock {
  public:
    void take() {
        const uint32_t mine = issued_.fetch_add(1);
        for (uint32_t now; (now = served_.load()) != mine;) futex_wait(served_, now, kSliceNs);
    }
    void give_up() {
        served_.fetch_add(1);
        if (held() || watchers_.load() != 0) futex_wake_all(served_);
    }
    bool held() const { return issued_.load() != served_.load(); }
    // Until nobody holds it, or one has given it up, or some time has passed.
    void await_change() {
        watchers_.fetch_add(1);
        const uint32_t seen = served_.load();
        if (issued_.load() != seen) futex_wait(served_, seen, kSliceNs);
        watchers_.fetch_sub(1);
    }
    // Whether somebody waits for it; asked by its holder.
    bool wanted() const { return issued_.load() - served_.load() > 1 || watchers_.load() != 0; }

  private:
    static constexpr int64_t kSliceNs = 100'000'000;

    Word issued_{0}, served_{0};
    Word watchers_{0};
};

}  // namespace dure
