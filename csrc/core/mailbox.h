// Point to point: messages between two ranks, independent of the collectives.
//
// Threads: everything may be called from any thread; one lock guards all of it. Whoever waits
// drives all traffic of the rank; a thread of its own does so for requests that nobody waits for.
// It begins with the first of them and sleeps while there are none.
//
// Order: messages of one sender and tag are received in the order in which they were sent.
//
// Files: mailbox.cpp has the requests, fast_path.cpp the messages that need none, matching.cpp
// which message goes to which receive, ring.cpp how bytes travel through a ring, rendezvous.cpp how
// they are copied once, mailbox_watch.cpp what goes wrong.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "group.h"
#include "message_ways.h"
#include "request.h"

namespace dure {

constexpr int kAnySource = -1;
constexpr size_t kBufferAll = SIZE_MAX;

class Mailbox {
  public:
    explicit Mailbox(Group& group);
    ~Mailbox() { stop(); }

    // Blocking. A message that fits into the ring leaves at once, or soon, whether or not it is
    // awaited, unless `set_eager_bytes` says otherwise.
    Outcome send(Block data, DType dtype, int to, int tag);
    // `source` receives the sender's rank.
    Outcome receive(Block data, DType dtype, int from, int tag, int* source);
    std::shared_ptr<Request> start_send(Block data, DType dtype, int to, int tag);
    std::shared_ptr<Request> start_receive(Block data, DType dtype, int from, int tag);
    // Who sent the first message with `tag` that came and awaits its receive; -1 if none did.
    int sender_of(int tag);
    // Longer messages are sent when their receive takes them, not before; 0: all messages.
    void set_eager_bytes(size_t bytes) { eager_bytes_.store(bytes); }
    // End all requests with `aborted`. Call Group::close first.
    void stop();

  private:
    // A message that was posted to be sent or received.
    struct Posted : Request {
        Op op;
        Block data;
        DType dtype;
        int peer;
        int tag;
        uint64_t number = 0;    // in the order of posting
        MessageWay way;         // of a send
        size_t moved = 0;       // bytes of a send that are in the ring
        int offer = -1;         // of a send: the place of its Offer
        bool payload = false;   // its envelope has gone, as an offer; its data go through the ring
        bool begun = false;     // some of the message is in the ring, or in `data`
        int64_t posted_ns = 0;  // of an offer, and of a receive whose time may count
        int64_t deadline_ns = 0;
    };
    using PostedPtr = std::shared_ptr<Posted>;
    // A message under way, or one that came before its receive was posted.
    struct Message {
        Envelope envelope;
        int source;
        int offer = -1;  // its place, until its data go through the ring
        Trial trial;
        size_t got = 0;
        size_t ahead = 0;             // of its bytes, those that come next in the ring
        PostedPtr request;            // who receives it; may come later
        PostedPtr sender;             // of a message to oneself that waits to be taken
        std::vector<std::byte> kept;  // the bytes, if nobody had asked for them on arrival
        bool complete() const { return offer < 0 && got == envelope.bytes; }
    };
    using MessagePtr = std::shared_ptr<Message>;
    // A place in a ring, or an amount of it.
    struct Stretch {
        uint64_t frames = 0, bytes = 0;
    };
    // What this rank remembers of the two rings that join it with a peer.
    struct Ends {
        Stretch written;                       // how far we have written ours
        Stretch taken;                         // how far the peer is known to have read it
        std::atomic<uint64_t> frames_read{0};  // how far we have read its
        uint64_t bytes_read = 0;               // likewise
        SentWays sent_ways;
        ReceivedWays received_ways;
        Stretch shown;                            // of that, what the peer has been told
        std::array<PostedPtr, kOffers> given;     // our sends by the place of their offer
        std::array<MessagePtr, kOffers> offered;  // its messages that are, or were, on offer
    };
    enum class Look { taken, nothing, otherwise };

    // The lock, for calls that may hold Python's: another thread can have it for as long as a large
    // message moves.
    std::unique_lock<std::mutex> locked();

    // fast_path.cpp
    bool send_at_once(Block data, DType dtype, int to, int tag, std::optional<MessageWay>& way);
    bool receive_at_once(Block data, DType dtype, int from, int tag);
    Look look(Block data, DType dtype, int from, int tag, Block& lines);
    Block lines_ahead();
    static void own_some(Block& lines);
    bool undisturbed(int from) const;
    // mailbox.cpp: requests
    Outcome drive(const PostedPtr& request);
    std::shared_ptr<Request> hand_over(const PostedPtr& request);
    PostedPtr post(Op op, Block data, DType dtype, int peer, int tag,
                   std::optional<MessageWay> way = {});
    void background();
    bool rest(const PostedPtr& waiter, int64_t waited_ns);
    bool progress();
    // mailbox_watch.cpp: failures
    void examine(const PostedPtr& waiter);
    void examine_one(Posted& request, int64_t now);
    void give_up(Posted& request, Outcome outcome);
    bool withdraw(Posted& request);
    void settle(Posted& request, Status status);
    void fail_all(Status status);
    void finish(Posted& request, Outcome outcome);
    void sweep();
    // matching.cpp: which message goes to which receive
    bool accept(const MessagePtr& message);
    void complete(Message& message);
    bool fits(const Message& message, const Posted& request) const;
    void refuse(Posted& request, const Message& message);
    void refuse_all(int from);
    void deliver_to_self(const PostedPtr& request);
    void post_receive(const PostedPtr& request);
    void drop(const MessagePtr& message);
    bool keep_received(Message& message);
    // ring.cpp: bytes
    bool push(int to);
    bool pull(int from);
    bool pull_piece(int from, Message& message);
    bool has_room(int to, Stretch wanted);
    static Stretch in_one(size_t bytes);
    Stretch in_pieces(size_t bytes) const;
    void write(int to, const Envelope& envelope, const std::byte* data, size_t n);
    void announce(int to, const Envelope& envelope, Trial trial);
    void write_piece(int to, const std::byte* data, size_t n);
    const Frame* next_frame(int from) const;
    void read(int from, std::byte* data, size_t n, bool large = false);
    void consume(int from, Stretch what);
    size_t piece(size_t bytes) const;
    bool begin(int from, const Frame& frame);
    bool make_room(int from, Message& message);
    static std::byte* memory_of(Message& message);
    void cut_short(Posted& request);
    void notify(int rank);
    // rendezvous.cpp: offers
    bool must_wait(size_t bytes) const;
    MessageWay way_of(Block data, int to);
    void note_time(const Message& message);
    bool copy_piece(int source, const Offer& offer, size_t at, Block piece);
    bool offer(int to, const PostedPtr& request);
    bool take(Message& message);
    void decline(Message& message);
    bool copy_taken(const MessagePtr& message);
    bool serve(int to, size_t place);
    bool serve_all();
    bool follow_all();
    void send_payload(int to, size_t place);
    void buffer_offers(int64_t now);
    bool some_offer_fits(int to) const;
    bool retract(Posted& request);
    Offer& offer_at(int from, int to, int place) const {
        return group_.ring(from, to).offers[static_cast<size_t>(place)];
    }
    Ends& ends(int peer) { return ends_[static_cast<size_t>(peer)]; }

    Group& group_;
    std::mutex lock_;
    std::vector<std::deque<PostedPtr>> sends_;  // by destination
    std::list<PostedPtr> receives_;             // posted, in order
    std::vector<MessagePtr> arriving_;          // by source: the message whose bytes come next
    std::list<MessagePtr> unexpected_;          // in order of arrival
    std::vector<Ends> ends_;                    // by peer
    int given_ = 0;                             // offers of ours that have not ended
    int following_ = 0;                         // offers to us that have a receive
    uint64_t posted_ = 0;                       // requests so far
    std::atomic<size_t> eager_bytes_{kBufferAll};
    int last_to_ = -1;  // where the last data went that lay in a ring
    size_t last_bytes_ = 0;

    std::condition_variable work_;   // for the thread: there are requests
    std::vector<PostedPtr> handed_;  // requests that nobody waits for, yet
    bool stopping_ = false;
    std::thread thread_;
};

}  // namespace dure
