// What Python calls "Group": a group with its two channels, its mailbox and its flight recorder.
//
// A call takes its place in its channel's order while it still holds the GIL, and is noted in the
// recorder in the same breath: so the order of the numbers is the order of the work.
//
// Calls return None when all went well, an Outcome when not, or a Request if asked to be
// asynchronous. The `plain_` calls are for plain tensors (tensor.h): True when done, False when the
// tensors are not plain (nothing has happened then), an Outcome on failure; a Request where they
// are asynchronous. What an operation works on lives until it has ended, even if its Request is
// dropped.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "callsite.h"
#include "channel.h"
#include "flight.h"
#include "interrupt.h"
#include "mailbox.h"
#include "python_request.h"
#include "tensor.h"

namespace dure {

constexpr size_t kBriefBytes = 32 * 1024;  // copied in about a microsecond

class Engine {
  public:
    explicit Engine(std::unique_ptr<Group> group);
    ~Engine();

    Group& group() { return *group_; }
    const Flight& flight() const { return *flight_; }

    // engine.cpp: addresses and lengths; each may be asynchronous
    nanobind::object run(int channel, Call call, bool async, nanobind::handle keep);
    nanobind::object send(Block block, DType dtype, int to, int tag, bool async,
                          nanobind::handle keep);
    // A Request in any case, finished where not asynchronous.
    nanobind::object receive(Block block, DType dtype, int from, int tag, bool async,
                             nanobind::handle keep);
    // See Mailbox::set_eager_bytes; negative: buffer all that fits.
    void set_eager_bytes(int64_t bytes) {
        mailbox_->set_eager_bytes(bytes < 0 ? kBufferAll : static_cast<size_t>(bytes));
    }
    int sender_of(int tag) { return forked() ? -1 : mailbox_->sender_of(tag); }
    nanobind::object host_shared_empty(size_t bytes);
    // Begin a block of calls that other threads must not interrupt. Returns True; False if this
    // thread is already inside a block or call; or an Outcome.
    nanobind::object enter(int channel);
    void leave(int channel) { inside_[channel].end(); }
    void close();

    // Makes the exception of an Outcome: called with it, its peer's process and the time limit.
    void set_error(nanobind::object error) { error_ = std::move(error); }
    [[noreturn]] void raise(const Outcome& outcome);
    // A child of the process that made the group must not act for its rank: it has neither the
    // rank's threads nor its place in the segment.
    bool forked() const { return forks() != made_after_; }

    // plain.cpp: tensors
    struct Place {
        int channel;
        bool async;
        bool counts = false;  // the version of the tensor that is written
    };
    nanobind::object plain_all_reduce(Place on, nanobind::handle tensor, nanobind::handle op);
    nanobind::object plain_all_reduce_into(Place on, nanobind::handle output,
                                           nanobind::handle input, nanobind::handle op);
    nanobind::object plain_broadcast(Place on, nanobind::handle tensor, nanobind::handle root);
    nanobind::object plain_all_gather(Place on, nanobind::handle output, nanobind::handle input);
    nanobind::object plain_reduce_scatter(Place on, nanobind::handle output, nanobind::handle input,
                                          nanobind::handle op);
    nanobind::object plain_all_gather_list(Place on, nanobind::handle outputs,
                                           nanobind::handle input);
    nanobind::object plain_reduce_scatter_list(Place on, nanobind::handle output,
                                               nanobind::handle inputs, nanobind::handle op);
    nanobind::object plain_all_to_all_list(Place on, nanobind::handle outputs,
                                           nanobind::handle inputs);
    nanobind::object plain_all_to_all(Place on, nanobind::handle output, nanobind::handle input);
    nanobind::object plain_all_to_all_cut(Place on, nanobind::handle output, nanobind::handle input,
                                          nanobind::handle taken_rows, nanobind::handle given_rows);
    nanobind::object plain_scatter_cut(Place on, nanobind::handle output, nanobind::handle input,
                                       nanobind::handle source, nanobind::handle given_rows);
    nanobind::object plain_barrier(Place on);
    nanobind::object plain_send(nanobind::handle tensor, nanobind::handle to, nanobind::handle tag);
    nanobind::object plain_receive(nanobind::handle tensor, nanobind::handle from,
                                   nanobind::handle tag, bool counts);

  private:
    struct Message {
        Op op;
        int peer, tag;
    };
    // Why a collective cannot begin.
    Status refusal() const {
        if (forked()) return Status::forked;
        return PythonCall::inside(group_.get()) ? Status::nested : Status::ok;
    }
    // Nor may a plain call begin inside a call on another group, whose memory it would use (see
    // `empty_call` in plain.cpp).
    bool may_begin() const { return !forked() && !PythonCall::any() && !is_watched(); }
    static std::atomic<uint32_t>& forks();

    bool is_rank(int peer) const { return peer >= 0 && peer < group_->size(); }

    // Note "One thread at a time". The order of a channel's calls is the program's. A thread that
    // calls while another one is inside a synchronous call has no order with it, and may match
    // another thread's call on another rank. So a synchronous call, or a block of calls (`enter`),
    // records its call site. A second thread's call is refused, and breaks the group
    // (core/threads.cpp). A thread that only starts an operation, or waits for one, is not inside a
    // call. All of this needs the GIL, except the end of a call: another thread may then have
    // waited for what the call has done, while the first one still waits for the GIL.
    struct Inside {
        std::atomic<const Site*> site = nullptr;
        const std::string* thread = nullptr;
        unsigned long id = 0;

        bool empty() const { return site.load(std::memory_order_acquire) == nullptr; }
        void begin(const Call& call) {
            site.store(call.site, std::memory_order_release);
            thread = call.thread;
            id = PyThread_get_thread_ident();
        }
        void end() { site.store(nullptr, std::memory_order_release); }
    };
    class Stay {
      public:
        Stay(Inside& place, const Call& call) : place_(place), first_(place.empty()) {
            if (first_) place.begin(call);
        }
        ~Stay() { end(); }
        void end() {
            if (first_) place_.end();
            first_ = false;
        }
        Stay(const Stay&) = delete;
        Stay& operator=(const Stay&) = delete;

      private:
        Inside& place_;
        bool first_;
    };
    // Where another thread is inside a call on the channel; null if none is.
    const Site* other_thread(int channel) const {
        const Inside& place = inside_[channel];
        const Site* const site = place.site.load(std::memory_order_acquire);
        return site != nullptr && place.id != PyThread_get_thread_ident() ? site : nullptr;
    }
    Outcome second_thread(int channel, const Site* first, const Call& call);

    uint64_t note(int channel, const Channel::Turn& turn, const Call& call, bool async);
    uint64_t note(const Message& message, Block block, DType dtype, const Site* site, bool async);
    nanobind::object plain(Place on, const Call& call, size_t bytes, nanobind::handle one,
                           nanobind::handle other);
    nanobind::object started(const std::shared_ptr<Request>& request, const Site* site,
                             nanobind::handle one, nanobind::handle other = nanobind::none());
    void release_ended();
    nanobind::object plain_message(const Message& message, nanobind::handle tensor, bool counts);
    nanobind::object failed(Status status, Op op);

    std::mutex closing_;
    bool closed_ = false;
    const uint32_t made_after_ = forks();
    std::shared_ptr<Flight> flight_ = std::make_shared<Flight>();
    std::unique_ptr<Group> group_;
    std::unique_ptr<Mailbox> mailbox_;
    nanobind::object error_;
    Inside inside_[kChannels];
    std::vector<std::shared_ptr<PendingCall>> pending_;
    size_t sweep_at_ = 16;
};

}  // namespace dure
