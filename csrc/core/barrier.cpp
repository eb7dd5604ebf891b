// Barriers: how ranks wait for each other.
//
// Note "Barrier". A rank arrives by raising its own `tick`, its arrival count, and waits until
// every peer's has reached the same number. Ticks count the barriers of the channel, so one
// comparison tells "has come this far, or further". Cost: one store, and n-1 cache lines read.
//
// Note "Waiting". A rank that waits goes through three stages. The first two are in backoff.h; a
// progress thread leaves them out while its rank computes.
//
// 1. Spin: look again and again, but only if nobody who is waited for was last seen on this core,
//    because a spinning rank keeps its neighbour away; and only for a short stretch where ranks
//    outnumber cores.
// 2. Yield: give up the core between looks. A switch to a neighbour costs about 1 us.
// 3. Sleep in the kernel until the peer's word changes. A sleeper counts itself in `waiters` of the
//    block whose word it watches; the arriving rank makes a system call only if that counter is not
//    0. Both sides use sequentially consistent operations: either the sleeper sees the new tick, or
//    the arriving rank sees the sleeper.
//
// Where k ranks share each core, an operation takes at least k-1 switches a core: the rank that
// comes last on a core spins until the other cores are through, goes on into the next operation at
// once, and gives way to a neighbour there.
//
// Sleeps are cut into slices of kSlice. After each the waiter examines the world (watching.cpp);
// the fast stages never look at any of it.
#include "backoff.h"
#include "call_queue.h"

namespace dure {

namespace {

constexpr int64_t kSliceNs = 4'000'000;
constexpr int64_t kGivesWayNs = 20'000;

}  // namespace

bool Channel::arrived(int rank) const {
    return static_cast<int32_t>(slot(rank).tick.load(std::memory_order_acquire) - tick_) >= 0;
}

void Channel::arrive() {
    ChannelBlock& mine = block(rank_);
    group_.show_core();
    Word& word = mine.slot[seq_ & 1].tick;
    word.store(++tick_, std::memory_order_seq_cst);
    if (mine.waiters.load(std::memory_order_seq_cst) != 0) futex_wake_all(word);
}

Status Channel::await_all() {
    const int r = first_missing(0);
    return r == size_ ? Status::ok : await_missing(r);
}

// The first rank from `r` on that has not arrived; `size_` if all have.
int Channel::first_missing(int r) const {
    while (r < size_ && arrived(r)) r++;
    return r;
}

bool Channel::neighbour_missing(int r) const {
    for (; r < size_; r++) {
        if (group_.shares_core(r) && !arrived(r)) return true;
    }
    return false;
}

// Wait for all from `r` on; those before have arrived. See "Large operations" in core_lock.h.
Status Channel::await_missing(int r) {
    const auto all_here = [&] {
        if (core_ && !holds_core_) take_core();
        return Status::ok;
    };
    // Peers that have begun come soon, so a slice is slept with the lock.
    bool gives_up = !all_begun_;
    if (background_ && !queue_->awaited()) {
        group_.about_to_wait();
        give_up_core();
        sleep_for(r);  // before we look for reasons not to
    } else {
        Backoff backoff(group_);
        do {
            if (r = first_missing(r); r == size_) return Status::ok;
            if (gives_way(backoff.waited_ns())) break;
        } while (backoff.pause([&] { return neighbour_missing(r); }));
    }
    const int64_t now = now_ns();
    if (started_ns_ == 0) started_ns_ = now;
    for (Wait wait{started_ns_, now};;) {
        if (r = first_missing(r); r == size_) return all_here();
        if (Status s = examine(wait); s != Status::ok) {
            return first_missing(r) == size_ ? all_here() : s;
        }
        if (gives_up) give_up_core();
        sleep_for(r);
        gives_up = true;
    }
}

// Whether to let the other channel go first, although this one's peers may come any moment.
bool Channel::gives_way(int64_t waited_ns) const {
    return index_ > 0 && holds_core_ && !all_begun_ && waited_ns > kGivesWayNs && core_->wanted();
}

// Sleep until `rank` arrives, at most a slice.
void Channel::sleep_for(int rank) {
    ChannelBlock& peer = block(rank);
    Word& word = peer.slot[seq_ & 1].tick;
    peer.waiters.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = word.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - tick_) < 0) {
        group_.show_asleep();
        futex_wait(word, seen, kSliceNs);
        group_.show_core();
    }
    peer.waiters.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace dure
