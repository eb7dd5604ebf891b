// A group: this rank's end of the shared segment, and the collectives on it.
//
// Threads: collectives may be called from any thread; a lock runs them one at a time, in the order
// of the calls. `close` may come from any thread at any time. A group must not be used in a child
// that was forked after `attach`: its threads do not exist there.
//
// After the first failure the group is broken for all ranks: the one that noticed writes the
// verdict into the segment (`condemn`), and every pending and later call on any rank ends with that
// outcome.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>

#include "arena.h"
#include "kernels.h"
#include "layout.h"
#include "peers.h"
#include "segment.h"
#include "watcher.h"

namespace dure {

struct Options {
    int rank = 0;
    int size = 1;
    int64_t timeout_ns = 0;
    int cores = 1;  // that this host has for the group's ranks
};

class Group {
  public:
    // Make the segment (rank 0), or map the one that rank 0 made. Throws std::system_error, or
    // std::runtime_error where what was found is not this group's segment.
    static std::unique_ptr<Group> create(const Options& options, uint64_t nonce);
    static std::unique_ptr<Group> attach(const Options& options, int pid, int fd, uint64_t nonce);
    // As `attach`, on the very mapping of a rank of this process: so that thread-ranks share
    // addresses, and a race detector sees what they do to each other (csrc/tests).
    static std::unique_ptr<Group> join(const Options& options, const Group& first);
    ~Group();
    Group(const Group&) = delete;
    Group& operator=(const Group&) = delete;

    // Ranks that have attached. Once all have, call `ready` before anything else.
    int attached() const;
    std::vector<int> not_attached() const;
    void wait_attached(int64_t ns) const;  // at most `ns`, or until one more has come
    void ready();

    int rank() const { return rank_; }
    int size() const { return size_; }
    int file() const { return file_.fd(); }
    int64_t timeout_ns() const { return timeout_ns_; }
    void set_timeout(int64_t ns) { timeout_ns_ = ns; }
    int pid_of(int rank) const;
    std::string fate_of(int rank) const { return peers_.fate(rank); }

    // Where the program of this rank is, for peers that wait in vain; before `ready`. Called on a
    // thread of its own.
    void set_where(Watcher::Where where) { watcher_.set_where(std::move(where)); }
    // Asked about every 100 ms of a wait, without locks of ours; true ends the wait (Ctrl-C).
    void set_interrupt(std::function<bool()> asked) { interrupt_ = std::move(asked); }

    // Called before a thread waits for longer than it takes to look: to let go of what others may
    // want meanwhile (Python's lock).
    void set_about_to_wait(void (*told)()) { about_to_wait_ = told; }

    // The collectives; see Call for which blocks each one takes. On anything but `ok`, `failure`
    // tells more.
    Status run(const Call& call);
    Status all_reduce(Block tensor, DType dtype, Reduction reduction);
    // A region for each rank; with `common`, one that all have.
    std::shared_ptr<SharedBlock> shared_empty(size_t bytes, Status& status,
                                              const Site* site = nullptr, bool common = false);

    // Say that this rank goes; its pending operations end with `aborted`. Does not wait for them.
    void leave();
    // Leave, and return when no thread is inside.
    void close();
    bool closing() const { return closing_.load(std::memory_order_acquire); }
    Outcome failure() const;

    // Give back the segment; after `close`, when the mailbox and the lane have stopped.
    void release();
    // What is to be told of an operation that ended with `status`.
    Outcome outcome_of(Status status, Op op) const;

    // Counts a thread that is inside; false if the group has been closed.
    class Visit {
      public:
        explicit Visit(Group& group) : group_(group) { group_.inside_.fetch_add(1); }
        ~Visit() { group_.inside_.fetch_sub(1); }
        Visit(const Visit&) = delete;
        Visit& operator=(const Visit&) = delete;
        // In one order with `close`, which says first that it closes and then counts: either this
        // sees it, or it sees us.
        explicit operator bool() const { return !group_.closing_.load(std::memory_order_seq_cst); }

      private:
        Group& group_;
    };

    // -- for the mailbox, which lives on the same segment
    // ------------------------------------------
    Header& header() const { return *reinterpret_cast<Header*>(base_); }
    RankBlock& block(int rank) const {
        return reinterpret_cast<RankBlock*>(base_ + layout_.ranks)[rank];
    }
    Ring& ring(int from, int to) const;
    size_t ring_bytes() const { return layout_.ring_bytes; }
    bool lost(int rank) const { return life_ended(block(rank)) || peers_.dead(rank); }
    // Where each of `ranks` is, by what it published and by what it answers within 100 ms.
    std::vector<std::string> whereabouts(const std::vector<int>& ranks);
    bool has_left(int rank) const;
    bool broken() const { return header().verdict.phase.load(std::memory_order_relaxed) != 0; }
    // For waiting (see "Waiting" in sync.cpp, "Stepping aside" in cores.cpp).
    bool crowded() const { return crowded_; }
    int64_t contended_until_ns() const { return contended_until_ns_.load(); }
    void set_contended_until(int64_t ns) { contended_until_ns_.store(ns); }
    void show_core() const;
    void show_asleep() const;
    bool shares_core(int rank) const;  // was last seen on this thread's core
    void step_aside(int64_t now);
    bool interrupted() { return interrupt_ && interrupt_(); }
    void about_to_wait() const { about_to_wait_(); }
    // Break the group for all ranks, unless it is broken already; returns the verdict's status.
    Status condemn(Outcome outcome);
    Status adopt_verdict();

  private:
    Group(const Options& options, MemoryFile file, std::shared_ptr<Mapping> mapping);
    void enter_rank();
    bool await_verdict() const;

    // -- synchronisation (sync.cpp)
    // ----------------------------------------------------------------
    // What a waiting rank remembers between two slices.
    struct Wait {
        int64_t began_ns;
        int64_t asked_ns;
    };
    OpSlot& slot(int rank) const { return block(rank).slot[seq_ & 1]; }
    bool arrived(int rank) const;
    int first_missing(int r) const;
    bool neighbour_missing(int r) const;
    void arrive();
    Status await_all();
    Status await_missing(int r);
    void sleep_for(int rank);
    Status meet() {
        arrive();
        return await_all();
    }
    // As `await_all`, but for the last `lag` arrivals of the others.
    Status await_all_but(uint32_t lag) {
        tick_ -= lag;
        const Status s = await_all();
        tick_ += lag;
        return s;
    }

    // -- what a waiting rank looks at (watching.cpp)
    // ---------------------------------------------
    Status examine(Wait& wait);
    std::string last_call(int rank) const;
    void wake_everyone() const;

    // -- the opening of every collective (opening.cpp)
    // -----------------------------------------------
    void announce(const Call& call, size_t bytes, uint64_t arena);
    void announce_blocks(const Call& call, uint64_t arena);
    void show_site(const Site* site);
    Status open();
    bool same_call(int rank) const;
    Status check_blocks() const;
    std::string describe_blocks(int rank) const;
    std::string describe_call(int rank) const;
    Status report_desync();
    uint64_t* table(int rank) const;
    size_t send_bytes(int from, int to) const;
    size_t most_bytes() const;

    // -- the collectives
    // ----------------------------------------------------------------------------
    struct Slices;
    struct Places;
    struct Staged;
    struct Transfer;
    enum class Sharing { none, some, all };  // of the ranks' tensors, in the arena at one place
    template <typename F>
    Status guarded(F collective);
    Status reduce(Block tensor, const Call& call);
    Status reduce_inlined(Block tensor, int root, ReduceFn kernel);
    Status reduce_whole(Block tensor, int root, ReduceFn kernel);
    Status reduce_swapped(const Staged& staged);
    Status reduce_sliced(const Staged& staged);
    Status reduce_direct(Block tensor, const SharedBlock& shared, ReduceFn kernel);
    void offer(const Staged& staged, size_t chunk);
    void answer(const Staged& staged, size_t chunk);
    void swap(const Staged& staged, size_t chunk);
    void copy_in(const Staged& staged, size_t chunk);
    void reduce_own_slice(const Staged& staged, size_t chunk);
    void copy_out(const Staged& staged, size_t chunk);
    Status move(const Call& call);
    Status move_staged(const Transfer& transfer);
    Status move_direct(const Transfer& transfer, const SharedBlock& shared);
    bool inlined(const Transfer& transfer, int sender) const;
    void put(const Transfer& transfer, size_t round);
    const std::byte* source(const Transfer& transfer, int peer, size_t round) const;
    void take(const Transfer& transfer, size_t round);
    uint64_t place_of(const Transfer& transfer, std::shared_ptr<SharedBlock>* shared) const;
    Sharing sharing_of(uint64_t place) const;
    std::shared_ptr<SharedBlock> allocate(size_t bytes, Status& status, const Site* site,
                                          bool common);

    // The buffer that `rank` uses after the next `ahead` ones.
    std::byte* stage(int rank, size_t ahead = 0) const {
        return base_ + layout_.staging +
               (static_cast<size_t>(rank) * kStages + (use_ + ahead) % kStages) * kStageBytes;
    }
    void next_stage(size_t used = 1) { use_ += used; }

    const int rank_, size_;
    std::atomic<int64_t> timeout_ns_;
    const bool crowded_;  // fewer cores than ranks
    const Layout layout_;
    MemoryFile file_;
    std::shared_ptr<Mapping> mapping_;
    std::byte* const base_;
    const size_t chunk_;  // bytes of a staging buffer that are used
    Peers peers_;
    Watcher watcher_;
    Arena arena_;
    std::function<bool()> interrupt_;
    void (*about_to_wait_)() = [] {};

    std::mutex running_;  // held during a collective; guards the three counters
    uint32_t seq_ = 0;    // collectives begun
    uint32_t tick_ = 0;   // arrivals made; equal on all ranks at equal places of the program
    uint64_t use_ = 0;    // stages used
    Op op_ = Op::none;
    const Site* shown_[2] = {nullptr, nullptr};  // what `site` of the own block tells
    int64_t started_ns_ = 0;                     // of the operation's first wait that was not short

    std::atomic<int64_t> contended_until_ns_{0};  // someone else computes on our cores
    std::atomic<uint32_t> shared_yields_{0};
    std::atomic<int64_t> moved_ns_{0}, move_pause_ns_{0};
    std::atomic<bool> closing_{false};
    std::atomic<int> inside_{0};
    std::atomic<bool> failed_{false};
    mutable std::mutex failure_lock_;
    Outcome failure_;
};

}  // namespace dure
