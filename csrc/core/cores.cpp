// On which cores the ranks run, how two of them part that share one for no reason, and for how long
// a rank rather sleeps that shares one with another program.
//
// Note "Core migration". Two ranks that wait for each other by turns look idle by turns, and where
// even a little else runs on the other cores, the kernel may leave both on one core for seconds:
// every barrier then costs two switches, 20 times what it costs otherwise. So a rank that has given
// up its core to a neighbour kSharedYields times looks where all the ranks were seen. If its own
// core has two more of them than another that it may use, and it is the last of those on its own,
// it moves: it forbids itself all cores but those with the fewest ranks, and at once allows itself
// again what was allowed before. It moves again after 5 ms at the earliest, and after twice the
// time of before if it met contention where it went.
//
// A program does not expect a barrier to change the affinity of its threads. So ranks move only if
// the group was asked to (`Options::migrates`), as `dure run` does for the ranks it starts.
//
// Meanwhile somebody else may say which cores the thread is to use (taskset, a batch system). The
// kernel cannot be asked to change that only if it is what it was. So the thread looks, before it
// allows itself again what was allowed before, whether its own word still holds, and otherwise
// leaves what it finds. What remains is a change within the microsecond between that look and the
// call that follows, at most once in 5 ms of a rank that shares its core: such a change is lost.
// And what is allowed again is what the kernel said: where the cores of a container grow later,
// this thread keeps to those it had.
//
// Note "Contention". A yield that took long met another program. If that program computes, the next
// yield takes as long, and sleeping is better for as long as it computes; if it was there for a
// moment, sleeping makes every operation some five times slower for nothing. So the first time is
// short, and it doubles while contention is met again soon after.
#include <sched.h>

#include <algorithm>

#include "group.h"

namespace dure {

namespace {

constexpr uint32_t kSharedYields = 64;
constexpr int64_t kShortestPauseNs = 5'000'000;
constexpr int64_t kLongestPauseNs = 500'000'000;
constexpr int64_t kShortestContentionNs = 500'000;
constexpr int64_t kLongestContentionNs = 5'000'000;

}  // namespace

void Group::show_core() const {
    Word& cpu = block(rank_).cpu;
    const auto now = static_cast<uint32_t>(sched_getcpu());
    if (cpu.load(std::memory_order_relaxed) != now) cpu.store(now, std::memory_order_relaxed);
}

// A rank that sleeps is on no core.
void Group::show_asleep() const { block(rank_).cpu.store(kNoCore, std::memory_order_relaxed); }

bool Group::shares_core(int rank) const {
    return block(rank).cpu.load(std::memory_order_relaxed) == static_cast<uint32_t>(sched_getcpu());
}

void Group::meet_contention(int64_t now) {
    const bool again = now < contended_until_ns_.load() + kLongestContentionNs;
    const int64_t longer = again ? 2 * contention_ns_.load() : 0;
    contention_ns_.store(std::clamp(longer, kShortestContentionNs, kLongestContentionNs));
    contended_until_ns_.store(now + contention_ns_.load());
}

// Called after each yield, which showed our core.
void Group::migrate(int64_t now) {
    if (!migrates_) return;
    if (shared_yields_.fetch_add(1, std::memory_order_relaxed) % kSharedYields != kSharedYields - 1)
        return;
    if (now < moved_ns_.load() + move_pause_ns_.load()) return;
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;  // more cores than a set has
    const auto core_of = [this](int r) { return block(r).cpu.load(std::memory_order_relaxed); };
    const uint32_t here = core_of(rank_);
    int ranks_on[CPU_SETSIZE] = {};
    for (int r = 0; r < size_; r++) {
        if (core_of(r) < CPU_SETSIZE) ranks_on[core_of(r)]++;
        if (r > rank_ && core_of(r) == here) return;
    }
    int fewest = size_;
    for (int c = 0; c < CPU_SETSIZE; c++) {
        if (CPU_ISSET(c, &allowed)) fewest = std::min(fewest, ranks_on[c]);
    }
    if (here >= CPU_SETSIZE || ranks_on[here] < fewest + 2) return;
    cpu_set_t better, found;
    CPU_ZERO(&better);
    for (int c = 0; c < CPU_SETSIZE; c++) {
        if (CPU_ISSET(c, &allowed) && ranks_on[c] == fewest) CPU_SET(c, &better);
    }
    if (sched_setaffinity(0, sizeof better, &better) == 0 &&
        sched_getaffinity(0, sizeof found, &found) == 0 && CPU_EQUAL(&found, &better)) {
        sched_setaffinity(0, sizeof allowed, &allowed);
    }
    show_core();
    const bool worse = contended_until_ns_.load() > moved_ns_.exchange(now);
    const int64_t longer = std::clamp(2 * move_pause_ns_.load(), kShortestPauseNs, kLongestPauseNs);
    move_pause_ns_.store(worse ? longer : kShortestPauseNs);
}

}  // namespace dure
