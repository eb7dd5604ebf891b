// Meeting: how ranks wait for each other.
//
// Note "Meeting". A rank arrives by raising its own `tick` and waits until every peer's tick has
// reached the same number. Ticks count the meetings of the group, so one comparison tells "has come
// this far, or further". Cost: one store, and n-1 cache lines read.
//
// Note "Waiting". Three stages. First look a while without giving up the core, but only if nobody
// who is waited for was last seen on it: a spinning rank keeps its neighbour away. Where ranks
// outnumber cores, this makes one switch a core and rank of every meeting: who comes last on a core
// spins until the other cores are through, goes on into the next meeting, and gives way to a
// neighbour there. Or else give up the core between looks, which costs 1.3 us. (These two stages
// are in patience.h.) Then sleep in the kernel until the peer's word changes. A sleeper counts
// itself in `waiters` of the block whose word it watches; the arriving rank makes a system call
// only if that counter is not 0. Both sides use sequentially consistent operations: either the
// sleeper sees the new tick, or the arriving rank sees the sleeper.
//
// Sleeps are cut into slices of kSlice. After each the waiter examines the world (watching.cpp);
// the fast stages never look at any of it.
#include "group.h"
#include "patience.h"

namespace dure {

namespace {

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
    const int r = first_missing(0);
    return r == size_ ? Status::ok : await_missing(r);
}

// The first rank from `r` on that has not arrived; `size_` if all have.
int Group::first_missing(int r) const {
    while (r < size_ && arrived(r)) r++;
    return r;
}

bool Group::neighbour_missing(int r) const {
    for (; r < size_; r++) {
        if (shares_core(r) && !arrived(r)) return true;
    }
    return false;
}

// Wait for all from `r` on; those before have arrived.
Status Group::await_missing(int r) {
    Patience patience(*this);
    do {
        if (r = first_missing(r); r == size_) return Status::ok;
    } while (patience.pause([&] { return neighbour_missing(r); }));
    if (started_ns_ == 0) started_ns_ = patience.began_ns();
    for (Wait wait{started_ns_, now_ns()};;) {
        if (r = first_missing(r); r == size_) return Status::ok;
        if (Status s = examine(wait); s != Status::ok) {
            return first_missing(r) == size_ ? Status::ok : s;
        }
        sleep_for(r);
    }
}

// Sleep until `rank` arrives, at most a slice.
void Group::sleep_for(int rank) {
    RankBlock& peer = block(rank);
    Word& word = peer.slot[seq_ & 1].tick;
    peer.waiters.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = word.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - tick_) < 0) {
        show_asleep();
        futex_wait(word, seen, kSliceNs);
        show_core();
    }
    peer.waiters.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace dure
