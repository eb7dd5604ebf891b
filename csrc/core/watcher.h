// A thread of each rank that sleeps, so that its death, and its answers, tell of the whole process.
//
// Note "Watcher". It does two things.
//
// *It dies at once.* The kernel ends a process in steps: its threads stop, its memory is taken
// apart (10 to 20 ms for a process that has imported torch), and only then do its pidfds tell.
// Before the memory it walks each thread's list of robust futexes and marks those that the thread
// holds. So the watcher holds one word of its rank's block (`life`) for as long as the rank is in
// the group; a peer that finds FUTEX_OWNER_DIED in it knows of the death after a scheduling delay.
// That costs nobody anything: one load where a waiting rank looks around.
//
// *It answers.* A peer that has waited too long asks where this rank is by raising `asked`. The
// watcher calls `where`, which looks at the program's stack from outside, and puts the text into
// the rank's block. A process that is stopped, or never lets go of the interpreter, does not
// answer.
//
// Robust futexes: the list is the thread's own, registered with the kernel in place of the C
// library's, of which this thread needs nothing, and given back at its end. It has one entry,
// `life_link`, at a fixed distance from the word it stands for. A forked child has no watcher, and
// holds nothing.
//
// Threads: `start` and `stop` by the group, once each; `set_where` at any time before `start`.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "layout.h"
#include "segment.h"

namespace dure {

class Watcher {
  public:
    using Where = std::function<std::string()>;

    Watcher() = default;
    ~Watcher() { stop(); }
    Watcher(const Watcher&) = delete;
    Watcher& operator=(const Watcher&) = delete;

    void set_where(Where where) { where_ = std::move(where); }
    // Without a thread (the system has no more) the rank is watched through its pidfd alone.
    void start(RankBlock& block, std::shared_ptr<Mapping> mapping);
    // Let go of the word, and end the thread.
    void stop();

  private:
    // Outlives this object where the thread itself destroys it, from inside `where`.
    struct Shared {
        RankBlock& block;
        std::shared_ptr<Mapping> mapping;
        Where where;
        std::atomic<bool> stopping{false};
    };
    static void work(Shared& shared);

    Where where_;
    std::shared_ptr<Shared> shared_;
    std::thread thread_;
};

// Whether the thread that held the word of this block has died without letting go.
inline bool life_ended(const RankBlock& block) {
    return (block.life.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0;
}

// Ask the rank of `block` where it is; returns the number of the question.
uint32_t ask(RankBlock& block);
// Wait until `deadline_ns` for the answer; "" if there is none.
std::string await_answer(RankBlock& block, uint32_t question, int64_t deadline_ns);

}  // namespace dure
