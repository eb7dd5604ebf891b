#include "lane.h"

#include "quiet_thread.h"

namespace dure {

std::shared_ptr<Ticket> Lane::start(Call call) {
    auto ticket = std::make_shared<Ticket>();
    std::lock_guard hold(lock_);
    if (stopping_) {
        Outcome out;
        out.status = Status::aborted;
        ticket->finish(std::move(out));
        return ticket;
    }
    // First, as it may fail: then nothing has been started.
    if (!thread_.joinable()) thread_ = start_quietly([this] { work(); }, "dure-lane");
    pending_.fetch_add(1);
    jobs_.push_back({std::move(call), ticket});
    changed_.notify_one();
    return ticket;
}

void Lane::work() {
    std::unique_lock hold(lock_);
    for (;;) {
        changed_.wait(hold, [this] { return stopping_ || !jobs_.empty(); });
        if (jobs_.empty()) return;
        Job job = std::move(jobs_.front());
        jobs_.pop_front();
        hold.unlock();
        finish(job, group_.run(job.call));
        hold.lock();
    }
}

void Lane::finish(Job& job, Status status) {
    Outcome out;
    if (status != Status::ok) out = group_.outcome_of(status, job.call.op);
    pending_.fetch_sub(1);
    job.ticket->finish(std::move(out));
}

void Lane::stop() {
    {
        std::lock_guard hold(lock_);
        stopping_ = true;
        changed_.notify_one();
    }
    // The group is closed: what is still queued ends with `aborted` as soon as it is run.
    if (thread_.joinable()) thread_.join();
}

}  // namespace dure
