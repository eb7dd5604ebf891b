// The processes of this host that this one shares memory with, itself among them.
//
// Note "Processes". Watching a process and mapping its memory belong to the process, not to a
// group: twelve groups of the same ranks have one pidfd and one mapping for each peer. A process
// is known by its pid and start time (a pid alone is used again), and reached through the
// descriptor of its symmetric heap (symmetric_heap.h), which it tells its peers (RankBlock). The
// first page of the heap is the process' own page, `ProcessPage`: it proves whose heap was opened,
// and holds what its watcher (watcher.h) shows and answers.
//
// How death is told: the watcher's word is marked by the kernel at once; a pidfd turns readable
// later, after the memory of the process was taken apart, but for certain, even as a zombie that
// nobody has reaped, and cannot be fooled by a reused number. A waiting rank asks for both, each
// time it has slept: one load and one poll(2).
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "futex.h"
#include "segment.h"

namespace dure {

constexpr size_t kAnswerBytes = 512;

// What a process shows in the first page of its heap. It is the only writer, but for `asked` and
// `about`.
struct ProcessPage {
    uint64_t magic;
    int32_t pid;
    uint64_t start_time;
    // See "Watcher" in watcher.h.
    alignas(128) Word life;  // the number of a thread of the process; the kernel marks its death
    uint64_t life_link;
    Word asked;                   // how often the process was asked where it is
    std::atomic<uint64_t> about;  // which of its places the last question was about
    Word answered;                // up to which question `answer` is the answer; 0: it changes
    std::atomic<uint64_t> answer[kAnswerBytes / 8];
};
static_assert(sizeof(ProcessPage) <= 4096);

// Python holds it by the same shared_ptr (enable_shared_from_this): one that held Python's object
// instead would want the GIL when the heap, with its lock, lets go of it.
class Process : public std::enable_shared_from_this<Process> {
  public:
    // The process `pid`, which started at `start_time` and has its heap at its descriptor
    // `heap_fd`; one object however often it is asked for. Null if that process has ended. Throws
    // std::system_error where its heap cannot be mapped.
    static std::shared_ptr<Process> of(int pid, uint64_t start_time, int heap_fd);
    // The lock of what is known, and, with it, the processes that process `pid`, this one or its
    // parent, has mapped.
    static std::mutex& lock();
    static std::vector<std::shared_ptr<Process>> all_known_to(int pid);
    ~Process();
    Process(const Process&) = delete;
    Process& operator=(const Process&) = delete;

    int pid() const { return pid_; }
    bool is_self() const { return self_; }
    // Map its heap again, at its address, so that what this process writes stays in it. False: the
    // process has ended, or the system refused.
    bool map_privately() const;
    ProcessPage& page() const { return *reinterpret_cast<ProcessPage*>(heap_->data()); }
    // Its symmetric heap, as mapped here.
    std::byte* heap() const { return heap_->data(); }
    size_t heap_bytes() const { return heap_->bytes(); }
    bool has(const std::byte* data) const {
        return static_cast<size_t>(data - heap_->data()) < heap_->bytes();
    }

    // Whether it has died. Never true of this very process.
    bool dead() const;
    // "exit code 3", "signal 9 (SIGKILL)", or "" if it cannot be known. A process that is still
    // being taken apart is waited for a few milliseconds.
    std::string fate() const;
    // What /proc says it does: 'R'unning, 'S'leeping, s'T'opped, ...; 0 if unknown, and for this
    // very process.
    char activity() const;

    // Ask where `about` is (a `Watched::place`); returns the number of the question.
    uint32_t ask(uint64_t about) const;
    // Wait until `deadline_ns` for the answer; "" if there is none.
    std::string await_answer(uint32_t question, int64_t deadline_ns) const;

  private:
    Process(int pid, int pidfd, int heap_fd, std::shared_ptr<Mapping> heap)
        : pid_(pid),
          self_(pidfd < 0 && pid == getpid()),
          pidfd_(pidfd),
          heap_fd_(heap_fd),
          heap_(std::move(heap)) {}

    const int pid_;
    const bool self_;
    const int pidfd_;    // -1: this process, or the system has no descriptor left
    const int heap_fd_;  // in that process
    const std::shared_ptr<Mapping> heap_;
};

}  // namespace dure
