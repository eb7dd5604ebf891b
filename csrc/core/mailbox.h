// Point to point: messages between two ranks, independent of the collectives.
//
// Threads: everything may be called from any thread; one lock guards all of it. Whoever waits
// drives all traffic of the rank; a thread of its own does so for requests that nobody waits for.
// It begins with the first of them and sleeps while there are none.
//
// Order: messages of one sender and tag are received in the order in which they were sent.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "group.h"
#include "ticket.h"

namespace dure {

constexpr int kAnySource = -1;
constexpr size_t kPad = 16;  // messages lie at multiples of it in a ring

class Mailbox {
  public:
    explicit Mailbox(Group& group);
    ~Mailbox() { stop(); }

    // Blocking. A message that fits into the ring leaves at once, whether or not it is awaited.
    Outcome send(Block data, DType dtype, int to, int tag);
    // `source` receives the sender's rank.
    Outcome receive(Block data, DType dtype, int from, int tag, int* source);
    std::shared_ptr<Ticket> start_send(Block data, DType dtype, int to, int tag);
    std::shared_ptr<Ticket> start_receive(Block data, DType dtype, int from, int tag);
    // Who sent the first message with `tag` that came and awaits its receive; -1 if none did.
    int sender_of(int tag);
    // End all requests with `aborted`. Call Group::close first.
    void stop();

  private:
    struct Request {
        Op op;
        Block data;
        DType dtype;
        int peer;
        int tag;
        size_t moved = 0;    // bytes of a send
        bool begun = false;  // some of the message is in the ring, or in `data`
        int64_t deadline_ns = 0;
        std::shared_ptr<Ticket> ticket = std::make_shared<Ticket>();
    };
    using RequestPtr = std::shared_ptr<Request>;
    // What precedes each message in a ring.
    struct Envelope {
        uint64_t bytes;
        int32_t tag;
        DType dtype;
    };
    // A message under way, or one that came before its receive was posted.
    struct Message {
        Envelope envelope;
        int source;
        size_t got = 0;
        RequestPtr request;           // who receives it; may come later
        std::vector<std::byte> kept;  // the bytes, if nobody had asked for them on arrival
        bool complete() const { return got == envelope.bytes; }
    };
    using MessagePtr = std::shared_ptr<Message>;
    // What this rank remembers of the two rings that join it with a peer.
    struct Ends {
        uint64_t seen_tail = 0;         // how far the peer is known to have read ours
        std::atomic<uint64_t> read{0};  // how far we have read its
        uint64_t shown = 0;             // of that, what the peer has been told
    };
    enum class Look { taken, nothing, otherwise };

    // The lock, for calls that may hold Python's: another thread can have it for as long as a large
    // message moves.
    std::unique_lock<std::mutex> locked();

    // quick.cpp: messages that need no request
    bool send_at_once(Block data, DType dtype, int to, int tag);
    bool receive_at_once(Block data, DType dtype, int from, int tag);
    Look look(Block data, DType dtype, int from, int tag);
    bool undisturbed(int from) const;
    // mailbox.cpp: requests
    Outcome drive(const RequestPtr& request);
    std::shared_ptr<Ticket> hand_over(RequestPtr request);
    RequestPtr post(Op op, Block data, DType dtype, int peer, int tag);
    void background();
    bool rest(const RequestPtr& waiter);
    // mailbox_watch.cpp: failures
    void examine(const RequestPtr& waiter);
    void examine_one(Request& request, int64_t now);
    void settle(Request& request, Status status);
    void fail_all(Status status);
    void finish(Request& request, Outcome outcome);
    void sweep();
    // stream.cpp: bytes
    bool progress();
    bool push(int to);
    bool pull(int from);
    uint64_t room(int to, uint64_t head, size_t wanted);
    void write(int to, uint64_t head, const Envelope* envelope, const std::byte* data, size_t n);
    void read(int from, uint64_t at, std::byte* data, size_t n);
    void show_read(int from);
    size_t piece(size_t bytes) const;
    bool begin(int from, uint64_t at);
    bool make_room(int from, Message& message);
    void refuse_all(int from);
    bool accept(const MessagePtr& message);
    void complete(Message& message);
    bool fits(const Message& message, const Request& request) const;
    void refuse(Request& request, const Message& message);
    void deliver_to_self(Request& request);
    void post_receive(const RequestPtr& request);
    void notify(int rank);

    Group& group_;
    std::mutex lock_;
    std::vector<std::deque<RequestPtr>> sends_;  // by destination
    std::list<RequestPtr> receives_;             // posted, in order
    std::vector<MessagePtr> arriving_;           // by source: the message whose bytes come next
    std::list<MessagePtr> unexpected_;           // in order of arrival
    std::vector<Ends> ends_;                     // by peer

    std::condition_variable work_;    // for the thread: there are requests
    std::vector<RequestPtr> handed_;  // requests that nobody waits for, yet
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace dure
