// A group: this rank's membership in a shared segment: its peers, the abort record, the watcher,
// and two channels, on which the collectives run (channel.h).
//
// Threads: anything may be called from any thread; `close` at any time. A group must not be used in
// a child that was forked after `attach`: its threads do not exist there.
//
// After the first failure the group is broken for all ranks, on both channels: the one that noticed
// writes the abort record into the segment (`abort`), and every pending and later call on any rank
// ends with that outcome.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core_lock.h"
#include "layout.h"
#include "process.h"
#include "segment.h"
#include "symmetric_heap.h"
#include "watcher.h"

namespace dure {

struct Options {
    int rank = 0;
    int size = 1;
    int64_t timeout_ns = 0;
    int cores = 1;                         // that this host has for the group's ranks
    int64_t single_copies = kLearnCopies;  // rank 0's counts; see copy_plan.h
    bool migrates = false;                 // see "Core migration" in cores.cpp
};

class Channel;

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
    void ready();                          // may throw as `attach` does

    int rank() const { return rank_; }
    int size() const { return size_; }
    int file() const { return file_.fd(); }
    int64_t timeout_ns() const { return timeout_ns_; }
    void set_timeout(int64_t ns) { timeout_ns_ = ns; }
    int pid_of(int rank) const;
    // How the process of `rank` ended, as far as it is known.
    std::string exit_of(int rank) const;
    // Null of a rank that ended, or left and ended, before this one was ready.
    const std::shared_ptr<Process>& process(int rank) const {
        return processes_[static_cast<size_t>(rank)];
    }

    // Where the program of this rank is, for peers that wait in vain; before `ready`. Called on a
    // thread of its own.
    void set_where(Watched::Where where) { where_ = std::move(where); }
    // Asked about every 100 ms of a wait, without locks of ours; true ends the wait (Ctrl-C).
    void set_interrupt(std::function<bool()> asked) { interrupt_ = std::move(asked); }

    // Called before a thread waits for longer than it takes to look: to let go of what others may
    // want meanwhile (Python's lock).
    void set_about_to_wait(void (*told)()) { about_to_wait_ = told; }

    Channel& channel(int index) { return *channels_[static_cast<size_t>(index)]; }
    // Collectives on channel 0.
    Status run(const Call& call);
    Status all_reduce(Block tensor, DType dtype, Reduction reduction);
    // Zeroed memory that is the same on all ranks.
    std::shared_ptr<HeapMemory> host_shared_empty(size_t bytes, Status& status,
                                                  const Site* site = nullptr);
    // Where [data, data + bytes) lies in a symmetric heap of the group's ranks (HeapPlace); 0 for
    // other memory.
    uint64_t find_in_heap(const std::byte* data, size_t bytes) const;
    // The memory of a place that a rank said.
    std::byte* at(uint64_t place) const {
        return process(HeapPlace::owner(place))->heap() + HeapPlace::offset(place);
    }
    SymmetricHeap& heap() const { return heap_; }

    // Say that this rank goes; its pending operations end with `aborted`. Does not wait for them.
    void leave();
    // Leave, and return when no thread is inside and the channels' threads have ended; what had not
    // begun on them ends with `aborted`.
    void close();
    bool closing() const { return closing_.load(std::memory_order_acquire); }
    Outcome failure() const;

    // Give back the segment; after `close`, when the mailbox has stopped.
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

    // How memory is copied between ranks; after `ready`.
    const CopyPlan& copies() const { return copies_; }

    // -- for the channels and the mailbox, which live on the same segment
    // --------------------------
    Header& header() const { return *reinterpret_cast<Header*>(base_); }
    RankBlock& block(int rank) const {
        return reinterpret_cast<RankBlock*>(base_ + layout_.ranks)[rank];
    }
    Ring& ring(int from, int to) const;
    size_t ring_bytes() const { return layout_.ring_bytes; }
    size_t ring_frames() const { return layout_.ring_frames; }
    // Where the data lie that do not fit into the frames.
    std::byte* ring_data(int from, int to) const {
        return reinterpret_cast<std::byte*>(ring(from, to).frames + layout_.ring_frames);
    }
    bool lost(int rank) const { return !process(rank) || process(rank)->dead(); }
    // Where each of `ranks` is, by what it published and by what it answers within 100 ms.
    std::vector<std::string> whereabouts(const std::vector<int>& ranks);
    bool has_left(int rank) const;
    // Broken as this rank knows already, or as any rank has said.
    bool failed() const { return failed_.load(std::memory_order_acquire); }
    // What is known of the ranks' threads (threads.cpp); 0 in most programs.
    uint32_t threads_seen() const {
        return header().abort_record.threads.load(std::memory_order_acquire);
    }
    // The thread `second` has called on `channel` while another one was inside call `number`.
    void note_crossing(int channel, uint32_t number, const std::string& second,
                       const std::string& text);
    Status abort_crossing();
    bool broken() const { return header().abort_record.phase.load(std::memory_order_relaxed) != 0; }
    // For waiting (see "Waiting" in barrier.cpp, "Core migration" in cores.cpp).
    bool oversubscribed() const { return oversubscribed_; }
    int64_t contended_until_ns() const { return contended_until_ns_.load(); }
    void meet_contention(int64_t now);
    void show_core() const;
    void show_asleep() const;
    bool shares_core(int rank) const;  // was last seen on this thread's core
    void migrate(int64_t now);
    // Null where the channels have cores enough (core_lock.h).
    CoreLock* core_lock() { return core_lock_ ? &*core_lock_ : nullptr; }
    bool interrupted() { return interrupt_ && interrupt_(); }
    void about_to_wait() const { about_to_wait_(); }
    // Break the group for all ranks, unless it is broken already; returns the record's status.
    Status abort(Outcome outcome);
    // The same because of an exception, most likely of memory that this rank could not get: `seq`
    // is the number of the call on `channel`.
    Status abort_after(const std::exception& error, int channel = 0, uint32_t seq = 0) noexcept;
    Status adopt_abort();
    // What the channels stand on.
    std::byte* base() const { return base_; }
    const Layout& layout() const { return layout_; }
    size_t chunk() const { return header().chunk; }

  private:
    Group(const Options& options, MemoryFile file, std::shared_ptr<Mapping> mapping);
    void enter_rank();
    bool await_record() const;
    // copy_agreement.cpp
    void bring_copy_plan();
    void agree_on_copies();
    bool may_copy_from_all() const;
    void wake_everyone() const;

    const int rank_, size_;
    std::atomic<int64_t> timeout_ns_;
    const bool oversubscribed_;  // fewer cores than ranks
    std::optional<CoreLock> core_lock_;
    const int64_t single_copies_;
    const bool migrates_;
    uint64_t proof_ = 0;  // what peers read from our memory to see whether they may
    CopyPlan copies_;
    const Layout layout_;
    MemoryFile file_;
    std::shared_ptr<Mapping> mapping_;
    std::byte* const base_;
    SymmetricHeap& heap_;                              // of this process
    std::vector<std::shared_ptr<Process>> processes_;  // by rank
    Watched::Where where_;
    std::optional<Watched> watched_;
    std::function<bool()> interrupt_;
    void (*about_to_wait_)() = [] {};
    std::array<std::unique_ptr<Channel>, kChannels> channels_;

    // Someone else computes on our cores: until when this rank rather sleeps, and for how long.
    std::atomic<int64_t> contended_until_ns_{0}, contention_ns_{0};
    std::atomic<uint32_t> shared_yields_{0};
    std::atomic<int64_t> moved_ns_{0}, move_pause_ns_{0};
    std::atomic<bool> closing_{false};
    std::atomic<int> inside_{0};
    std::atomic<bool> failed_{false};
    mutable std::mutex failure_lock_;
    Outcome failure_;
};

}  // namespace dure
