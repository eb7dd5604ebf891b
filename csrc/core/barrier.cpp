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
// Sleeps are cut into slices (`slice_ns`). After each the waiter examines the world (watching.cpp);
// the fast stages never look at any of it.
#include "backoff.h"
#include "call_queue.h"

namespace dure {

namespace {

// For all ranks to begin: longer than the progress thread leaves a call alone, and longer still
// where they come one after the other.
constexpr int64_t kBeginNs = 500'000, kBeginSharedNs = 2'000'000;

}  // namespace

// Whether `rank` has come to arrival `tick`, or further.
bool Channel::arrived(int rank, uint32_t tick) const {
    return static_cast<int32_t>(slot(rank).tick.load(std::memory_order_acquire) - tick) >= 0;
}

void Channel::arrive() {
    ChannelBlock& mine = block(rank_);
    group_.show_core();
    Word& word = mine.slot[seq_ & 1].tick;
    word.store(++tick_, std::memory_order_seq_cst);
    if (mine.waiters.load(std::memory_order_seq_cst) != 0) futex_wake_all(word);
}

Status Channel::await_tick(uint32_t tick) {
    const int r = first_missing(0, tick);
    return r == size_ ? Status::ok : await_missing(r, tick);
}

// The first rank from `r` on that has not arrived; `size_` if all have.
int Channel::first_missing(int r, uint32_t tick) const {
    while (r < size_ && arrived(r, tick)) r++;
    return r;
}

bool Channel::neighbour_missing(int r, uint32_t tick) const {
    for (; r < size_; r++) {
        if (group_.shares_core(r) && !arrived(r, tick)) return true;
    }
    return false;
}

// Wait for all from `r` on; those before have arrived. Of a large operation, the rank has the lock
// again when they have (core_lock.h).
Status Channel::await_missing(int r, uint32_t tick) {
    const auto all_here = [&] {
        if (core_ && !holds_core_) take_core();
        return Status::ok;
    };
    if (background_ && !rank_waits()) {
        group_.about_to_wait();
        give_up_core();
        sleep_for(r, tick, kShortestSliceNs);  // before we look for reasons not to
    } else {
        Backoff backoff(group_);
        do {
            if (r = first_missing(r, tick); r == size_) return Status::ok;
        } while (backoff.pause([&] { return neighbour_missing(r, tick); }));
    }
    const int64_t now = now_ns(), holds_until_ns = now + patience_ns();
    if (started_ns_ == 0) started_ns_ = now;
    for (Wait wait{started_ns_, now};;) {
        if (r = first_missing(r, tick); r == size_) return all_here();
        if (Status s = examine(wait, tick); s != Status::ok) {
            return first_missing(r, tick) == size_ ? all_here() : s;
        }
        const int64_t at_ns = now_ns(), holds_ns = holds_core_ ? holds_until_ns - at_ns : 0;
        if (holds_ns <= 0) give_up_core();
        sleep_for(r, tick, holds_ns > 0 ? holds_ns : slice_ns(at_ns - now));
    }
}

// How long a rank sleeps with the lock: longer for peers that have all begun, and will come soon.
// It has given it up before it asks whether it was interrupted, so a handler may call us.
int64_t Channel::patience_ns() const {
    const int64_t first = all_begun_                ? kShortestSliceNs
                          : group_.oversubscribed() ? kBeginSharedNs
                                                    : kBeginNs;
    return index_ == 0 ? first : first / 4;
}

// Whether a thread of this rank waits, so that its core is free. On the other channel it may be
// running what it waits for, but not while we have the lock.
bool Channel::rank_waits() const {
    return queue_->awaited() || (holds_core_ && group_.channel(1 - index_).queue_->awaited());
}

// Sleep until `rank` comes to arrival `tick`, at most `ns`.
void Channel::sleep_for(int rank, uint32_t tick, int64_t ns) {
    ChannelBlock& peer = block(rank);
    Word& word = peer.slot[seq_ & 1].tick;
    peer.waiters.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = word.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - tick) < 0) {
        group_.show_asleep();
        futex_wait(word, seen, ns);
        group_.show_core();
    }
    peer.waiters.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace dure
