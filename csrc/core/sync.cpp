// Meeting: how ranks wait for each other.
//
// Note "Meeting". A rank arrives by raising its own `tick` and waits until every peer's tick has
// reached the same number. Ticks count the meetings of the group, so one comparison tells "has come
// this far, or further". Cost: one store, and n-1 cache lines read.
//
// Note "Waiting". Three stages. First look a while without giving up the core, but only if the host
// has a core for every rank; a spinning rank on a shared core keeps away the very rank it waits
// for. Then give up the core between looks, which costs 0.3 us if nobody wants it. Then sleep in
// the kernel until the peer's word changes. A sleeper counts itself in `waiters` of the block whose
// word it watches; the arriving rank makes a system call only if that counter is not 0. Both sides
// use sequentially consistent operations: either the sleeper sees the new tick, or the arriving
// rank sees the sleeper.
//
// Sleeps are cut into slices of kSlice. After each the waiter examines the world (watching.cpp);
// the fast stages never look at any of it.
#include "group.h"

namespace dure {

namespace {

constexpr int kSpins = 20;                 // a peer may be just about to store
constexpr int64_t kSpinNs = 100'000;       // as long as a chunk's copy, or several wake-ups
constexpr int64_t kYieldNs = 200'000;      // then sleeping is cheap by comparison
constexpr int64_t kContendedNs = 100'000;  // a yield that long met no small operation of ours
constexpr int64_t kContentionNs = 5'000'000;
constexpr int64_t kSliceNs = 4'000'000;

}  // namespace

bool Group::arrived(int rank) const {
    return static_cast<int32_t>(slot(rank).tick.load(std::memory_order_acquire) - tick_) >= 0;
}

void Group::arrive() {
    RankBlock& mine = block(rank_);
    show_core();
    Word& word = mine.slot[seq_ & 1].tick;
    word.store(++tick_, std::memory_order_seq_cst);
    if (mine.waiters.load(std::memory_order_seq_cst) != 0) futex_wake_all(word);
}

Status Group::await_all() {
    for (int r = 0; r < size_; r++) {
        if (arrived(r)) continue;
        if (Status s = await_rank(r); s != Status::ok) return s;
    }
    return Status::ok;
}

void Group::show_core() const {
    Word& cpu = block(rank_).cpu;
    const auto now = static_cast<uint32_t>(sched_getcpu());
    if (cpu.load(std::memory_order_relaxed) != now) cpu.store(now, std::memory_order_relaxed);
}

bool Group::may_spin(int rank) const {
    return !crowded_ &&
           block(rank).cpu.load(std::memory_order_relaxed) != static_cast<uint32_t>(sched_getcpu());
}

bool Group::spin(int rank, int times) const {
    for (int i = 0; i < times; i++) {
        if (arrived(rank)) return true;
        relax();
    }
    return false;
}

Status Group::await_rank(int rank) {
    if (spin(rank, kSpins)) return Status::ok;
    about_to_wait();
    Wait wait{now_ns(), now_ns()};
    while (may_spin(rank) && now_ns() - wait.began_ns < kSpinNs) {
        if (spin(rank, kSpins)) return Status::ok;
    }
    if (started_ns_ == 0) started_ns_ = wait.began_ns;
    for (int64_t now = now_ns(); now - wait.began_ns < kYieldNs && may_yield(now);) {
        if (arrived(rank)) return Status::ok;
        now = yield_core(now);
    }
    RankBlock& peer = block(rank);
    Word& word = peer.slot[seq_ & 1].tick;
    for (;;) {
        if (arrived(rank)) return Status::ok;
        if (Status s = examine(wait); s != Status::ok) return arrived(rank) ? Status::ok : s;
        peer.waiters.fetch_add(1, std::memory_order_seq_cst);
        uint32_t seen = word.load(std::memory_order_seq_cst);
        if (static_cast<int32_t>(seen - tick_) < 0) futex_wait(word, seen, kSliceNs);
        peer.waiters.fetch_sub(1, std::memory_order_seq_cst);
    }
}

// Give up the core at `now`; returns the time after. Remembers if that took long.
int64_t Group::yield_core(int64_t now) {
    sched_yield();
    const int64_t after = now_ns();
    if (after - now > kContendedNs) contended_until_ns_.store(after + kContentionNs);
    return after;
}

}  // namespace dure
