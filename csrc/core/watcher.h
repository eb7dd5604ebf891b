// A thread of each process that sleeps, so that its death, and its answers, tell of the process.
//
// Note "Watcher". It does two things.
//
// *It dies at once.* The kernel ends a process in steps: its threads stop, its memory is taken
// apart (10 to 20 ms for a process that has imported torch), and only then do its pidfds tell.
// Before the memory it walks each thread's list of robust futexes and marks those that the thread
// holds. So the watcher holds one word of its process' page (`life`) for as long as the process is
// in a group; a peer that finds FUTEX_OWNER_DIED in it knows of the death after a scheduling delay.
// That costs nobody anything: one load where a waiting rank looks around.
//
// *It answers.* A peer that has waited too long asks where a rank of this process is: it names the
// rank's place (`about`) and raises `asked`. The watcher calls what was added for that place, which
// looks at the program's stack from outside, and puts the text into the page. A process that is
// stopped, or never lets go of the interpreter, does not answer.
//
// Robust futexes: the list is the thread's own, registered with the kernel in place of the C
// library's, of which this thread needs nothing, and given back at its end. It has one entry,
// `life_link`, at a fixed distance from the word it stands for. A forked child has no watcher, and
// holds nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace dure {

// Keeps this process watched for as long as it lives: the thread begins with the first of them and
// ends with the last. Where the system has no more threads, pidfds alone tell. Threads: any; where
// the caller holds a lock that `Where` takes (Python's), it lets go of it first.
class Watched {
  public:
    using Where = std::function<std::string()>;

    // `where` tells where a rank of this process is; called on the watcher's thread.
    explicit Watched(Where where);
    ~Watched();
    Watched(const Watched&) = delete;
    Watched& operator=(const Watched&) = delete;

    // What a peer asks about (Process::ask).
    uint64_t place() const { return place_; }

  private:
    const uint64_t place_;
};

}  // namespace dure
