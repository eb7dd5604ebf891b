// A thread that runs collectives in the order in which they were started.
//
// The thread begins with the first asynchronous call and sleeps while there is nothing to do. A
// synchronous call runs on its caller's own thread if the lane is idle, else it takes its place in
// the queue, so that the order of the calls is the order of the operations.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "group.h"
#include "ticket.h"

namespace dure {

class Lane {
  public:
    explicit Lane(Group& group) : group_(group) {}
    ~Lane() { stop(); }

    bool idle() const { return pending_.load(std::memory_order_acquire) == 0; }
    std::shared_ptr<Ticket> start(Call call);
    // End the thread. Operations that have not begun end with `aborted`; call Group::close first,
    // so that a running one ends too.
    void stop();

  private:
    struct Job {
        Call call;
        std::shared_ptr<Ticket> ticket;
    };
    void work();
    void finish(Job& job, Status status);

    Group& group_;
    std::mutex lock_;
    std::condition_variable changed_;
    std::deque<Job> jobs_;
    std::atomic<int> pending_{0};  // queued, or running
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace dure
