// Watching the other ranks' processes.
//
// A pidfd of every peer is opened while all are known to be alive; it turns readable when the
// process has ended, even as a zombie that nobody has reaped, and cannot be fooled by a reused
// number. Asking costs one poll(2); the waiting loop asks only after it has slept (watching.cpp).
// It tells late, though: after the process' memory was taken apart (see "Watcher" in watcher.h).
#pragma once

#include <string>
#include <vector>

namespace dure {

class Peers {
  public:
    Peers() = default;
    ~Peers() { close(); }
    Peers(const Peers&) = delete;
    Peers& operator=(const Peers&) = delete;

    // Open the process of the next rank; `self` ranks are never watched, nor is a process for which
    // the system gives no pidfd (no descriptor is left): its watcher alone tells of its death then.
    // Returns false if the process has already gone.
    bool add(int pid, unsigned long long start_time, bool self);
    bool dead(int rank) const;
    // "exit code 3", "signal 9 (SIGKILL)", or "" if it cannot be known. A process that is still
    // being taken apart is waited for a few milliseconds.
    std::string fate(int rank) const;
    // What /proc says a living process does: 'R'unning, 'S'leeping, s'T'opped, ...; 0 if unknown,
    // and for ranks of this very process.
    char activity(int rank) const;
    void close();

  private:
    struct Peer {
        int pid;
        int fd;
    };
    std::vector<Peer> peers_;
};

}  // namespace dure
