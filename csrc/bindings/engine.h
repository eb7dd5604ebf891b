// What Python calls "Group": a group with its lane for asynchronous collectives, its mailbox and
// its flight recorder.
//
// Calls return None when all went well, an Outcome when not, or a Ticket if asked to be
// asynchronous. The `plain_` calls are for plain tensors (tensor.h) and synchronous: True when
// done, False when the tensors are not plain (nothing has happened then), an Outcome on failure.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "callsite.h"
#include "flight.h"
#include "interrupt.h"
#include "lane.h"
#include "mailbox.h"
#include "tensor.h"

namespace dure {

class Engine {
  public:
    explicit Engine(std::unique_ptr<Group> group);
    ~Engine();

    Group& group() { return *group_; }
    const Flight& flight() const { return *flight_; }

    // engine.cpp: addresses and lengths; each may be asynchronous
    nanobind::object run(Call call, bool async);
    nanobind::object send(Block block, DType dtype, int to, int tag, bool async);
    // A finished ticket where not asynchronous.
    std::shared_ptr<Ticket> receive(Block block, DType dtype, int from, int tag, bool async);
    int sender_of(int tag) { return forked() ? -1 : mailbox_->sender_of(tag); }
    nanobind::object shared_empty(size_t bytes, bool common);
    void close();

    // plain.cpp: tensors
    nanobind::object plain_all_reduce(nanobind::handle tensor, nanobind::handle op);
    nanobind::object plain_broadcast(nanobind::handle tensor, nanobind::handle root);
    nanobind::object plain_all_gather(nanobind::handle output, nanobind::handle input);
    nanobind::object plain_reduce_scatter(nanobind::handle output, nanobind::handle input,
                                          nanobind::handle op);
    nanobind::object plain_all_to_all(nanobind::handle output, nanobind::handle input);
    nanobind::object plain_barrier();
    nanobind::object plain_send(nanobind::handle tensor, nanobind::handle to, nanobind::handle tag);
    nanobind::object plain_receive(nanobind::handle tensor, nanobind::handle from,
                                   nanobind::handle tag);

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
    bool may_begin() const { return !forked() && !PythonCall::any() && lane_->idle(); }
    // A child of the process that made the group must not act for its rank.
    bool forked() const { return forks() != made_after_; }
    static std::atomic<uint32_t>& forks();

    bool is_rank(int peer) const { return peer >= 0 && peer < group_->size(); }

    uint64_t note(const Call& call, bool async);
    uint64_t note(const Message& message, Block block, DType dtype, bool async);
    template <typename F>
    nanobind::object plain(const Call& call, size_t bytes, F body);
    nanobind::object plain_message(const Message& message, nanobind::handle tensor);
    nanobind::object failed(Status status, Op op);
    void wait_or_break(Ticket& ticket);

    std::mutex closing_;
    bool closed_ = false;
    const uint32_t made_after_ = forks();
    std::shared_ptr<Flight> flight_ = std::make_shared<Flight>();
    std::unique_ptr<Group> group_;
    std::unique_ptr<Mailbox> mailbox_;
    std::unique_ptr<Lane> lane_;
};

}  // namespace dure
