// Messages that are copied once.
//
// Note "Rendezvous". A large message is not put into the ring: its envelope goes there, and names
// one of kOffers places beside it, an Offer, that holds the address of the data. When a receive for
// the message is posted, the receiver takes the offer, and copies the data straight into its tensor
// (single_copy.h). The send is over when the receiver reports that all of it has been copied.
//
// Only the receiver copies. Two ranks that both copied would need half the time, but a sender that
// writes cannot know that the receive has failed in the meantime and that its memory is in use for
// something else. What a receiver reads of a send that has failed, it discards.
//
// An offer has one state, which is only changed by compare-and-exchange once the offer has been
// made:
//
//     free -> offered            by the sender
//     offered -> taken           by the receiver, which copies from now on
//     taken -> done              by the receiver: all has been copied
//     done -> free               by the sender, whose request has ended
//     offered, taken -> declined by the receiver, which may not, or cannot, copy, or whose receive
//                                has ended: the data go through the ring
//     offered -> streamed        by the sender: as declined, but before the offer was taken
//     offered, declined, streamed -> withdrawn    by the sender, whose request has failed
//     taken -> abandoned         likewise, during the copying
//     declined, streamed -> free by the receiver, when the data begin to come through the ring
//     withdrawn, abandoned -> free    by the receiver, which forgets the message
//
// So the end of either request in between leaves nothing behind: the receiver forgets a message
// that was withdrawn; a receive that has lost its message is posted again.
//
// A sender need not wait for its receive if the message would fit into the ring: when the offer has
// not been taken within kOfferNs, the data follow through the ring ("streamed").
//
// Data in a symmetric heap are mapped by the receiver: then copying needs no permission.
//
// Cost of S bytes between two ranks that wait: S moved once; two lines to announce, take and end.
#include <algorithm>

#include "mailbox.h"
#include "single_copy.h"

namespace dure {

namespace {

constexpr int64_t kOfferNs = 200'000;
constexpr size_t kPieceBytes = 256 * 1024;  // copied by one call
constexpr uint64_t kMostAtOnce = 8;         // pieces, between looks at other traffic

enum class State : uint32_t {
    free,
    offered,
    taken,
    done,
    withdrawn,
    streamed,
    declined,
    abandoned,
};

State state_of(const Offer& offer) {
    return static_cast<State>(offer.state.load(std::memory_order_acquire));
}

void set_state(Offer& offer, State state) {
    offer.state.store(static_cast<uint32_t>(state), std::memory_order_release);
}

// Change the state from one among `from` to `to`; false if it is none of them.
bool change_state(Offer& offer, std::initializer_list<State> from, State to) {
    uint32_t seen = offer.state.load(std::memory_order_acquire);
    while (std::find(from.begin(), from.end(), static_cast<State>(seen)) != from.end()) {
        if (offer.state.compare_exchange_weak(seen, static_cast<uint32_t>(to),
                                              std::memory_order_acq_rel)) {
            return true;
        }
    }
    return false;
}

}  // namespace

// Whether a message may leave only when its receive is there.
bool Mailbox::must_wait(size_t bytes) const {
    const size_t eager = eager_bytes_.load(std::memory_order_relaxed);
    return eager == 0 || bytes > eager;
}

// How the next message to `to` goes.
MessageWay Mailbox::way_of(Block data, int to) {
    const CopyPlan& plan = group_.copies();
    const bool asked = data.bytes >= plan.once_bytes;
    if (data.bytes < kZeroCopyBytes && !asked && !must_wait(data.bytes))
        return {};  // most messages
    if (must_wait(data.bytes)) return {true, {}};
    const bool in_heap = group_.find_in_heap(data.data, data.bytes) != 0;
    if (!plan.learns) return {in_heap || asked, {}};
    if (data.bytes <= kLeastLearnt || !(in_heap || plan.permitted)) return {};
    const Word& once = group_.ring(group_.rank(), to).once;
    return ends(to).sent_ways.next(message_kind(data.bytes, in_heap), once.load());
}

// A message has come that tried a way.
void Mailbox::note_time(const Message& message) {
    const Trial& trial = message.trial;
    const int64_t began_ns = std::max(trial.began_ns, message.request->posted_ns);
    const size_t bytes = message.envelope.bytes;
    group_.ring(message.source, group_.rank())
        .once.store(ends(message.source).received_ways.note(trial, bytes, now_ns() - began_ns));
}

// ---- the sender ---------------------------------------------------------------------------------

// Make an offer of the message. False: there is no place for it now.
bool Mailbox::offer(int to, const PostedPtr& request) {
    auto& given = ends(to).given;
    if (!has_room(to, {1, 0})) return false;
    for (size_t k = 0; k < kOffers; k++) {
        Offer& o = offer_at(group_.rank(), to, static_cast<int>(k));
        if (given[k] || state_of(o) != State::free) continue;
        o.from = reinterpret_cast<uint64_t>(request->data.data);
        o.from_heap = request->data.bytes >= kZeroCopyBytes
                          ? group_.find_in_heap(request->data.data, request->data.bytes)
                          : 0;
        set_state(o, State::offered);
        const Envelope envelope{request->data.bytes, request->tag, request->dtype, Kind::offer,
                                static_cast<uint16_t>(k)};
        announce(to, envelope, request->way.trial);
        request->offer = static_cast<int>(k);
        given[k] = request;
        given_++;
        return true;
    }
    return false;
}

bool Mailbox::serve_all() {
    bool moved = false;
    for (int to = 0; to < group_.size(); to++) {
        for (size_t k = 0; k < kOffers; k++) {
            if (ends(to).given[k]) moved |= serve(to, k);
        }
    }
    return moved;
}

// See what has become of an offer: end its request, or send the data through the ring.
bool Mailbox::serve(int to, size_t place) {
    Offer& o = offer_at(group_.rank(), to, static_cast<int>(place));
    const State now = state_of(o);
    if (now == State::declined) {
        send_payload(to, place);
        return true;
    }
    if (now != State::done) return false;
    const PostedPtr request = std::move(ends(to).given[place]);
    given_--;
    set_state(o, State::free);
    finish(*request, {});
    return true;
}

// The data of an offer go through the ring, before messages that have not begun.
void Mailbox::send_payload(int to, size_t place) {
    auto& queue = sends_[static_cast<size_t>(to)];
    PostedPtr request = std::move(ends(to).given[place]);
    given_--;
    request->payload = true;
    const bool behind = !queue.empty() && queue.front()->begun;
    queue.insert(queue.begin() + (behind ? 1 : 0), std::move(request));
}

// Send through the ring what was offered in vain for a while and would fit.
void Mailbox::buffer_offers(int64_t now) {
    for (int to = 0; given_ > 0 && to < group_.size(); to++) {
        for (size_t k = 0; k < kOffers; k++) {
            const PostedPtr& r = ends(to).given[k];
            if (!r || must_wait(r->data.bytes) || now - r->posted_ns < kOfferNs) continue;
            const auto& queue = sends_[static_cast<size_t>(to)];
            const bool begun = !queue.empty() && queue.front()->begun;
            if (begun || !has_room(to, in_pieces(r->data.bytes))) continue;
            Offer& o = offer_at(group_.rank(), to, static_cast<int>(k));
            if (!change_state(o, {State::offered}, State::streamed)) continue;
            send_payload(to, k);
            push(to);
        }
    }
}

// Whether some message on offer to a rank will go through the ring if nobody takes it.
bool Mailbox::some_offer_fits(int to) const {
    const auto& given = ends_[static_cast<size_t>(to)].given;
    return std::any_of(given.begin(), given.end(), [this](const PostedPtr& r) {
        return r && !must_wait(r->data.bytes) &&
               in_pieces(r->data.bytes).bytes <= group_.ring_bytes();
    });
}

// Take back the offer of a request that has failed. False: it was copied to the end just now.
bool Mailbox::retract(Posted& request) {
    Offer& o = offer_at(group_.rank(), request.peer, request.offer);
    const bool back =
        change_state(o, {State::offered, State::declined, State::streamed}, State::withdrawn) ||
        change_state(o, {State::taken}, State::abandoned) ||
        change_state(o, {State::declined}, State::withdrawn);  // taken until a moment ago
    if (PostedPtr& given = ends(request.peer).given[static_cast<size_t>(request.offer)];
        given.get() == &request) {
        given.reset();
        given_--;
        if (!back) set_state(o, State::free);
    }
    notify(request.peer);
    return back;
}

// ---- the receiver -------------------------------------------------------------------------------

// Take the offer for the message's receive, or decline it if this rank may not copy. False: it is
// no longer on offer.
bool Mailbox::take(Message& message) {
    Offer& o = offer_at(message.source, group_.rank(), message.offer);
    const bool may = group_.copies().permitted || o.from_heap != 0;
    if (!change_state(o, {State::offered}, may ? State::taken : State::declined)) return false;
    if (may) {
        message.request->begun = true;
    } else {
        notify(message.source);
    }
    return true;
}

// Look after all messages that are on offer to this rank.
bool Mailbox::follow_all() {
    bool moved = false;
    for (int from = 0; from < group_.size(); from++) {
        for (size_t k = 0; k < kOffers; k++) {
            const MessagePtr message = ends(from).offered[k];
            if (!message) continue;
            const State now = state_of(offer_at(from, group_.rank(), static_cast<int>(k)));
            if (now == State::withdrawn || now == State::abandoned) {
                drop(message);
                moved = true;
            } else if (now == State::taken && message->request) {
                moved |= copy_taken(message);
            }
        }
    }
    return moved;
}

// Copy pieces of a message that has been taken, and end it after the last.
bool Mailbox::copy_taken(const MessagePtr& message) {
    Offer& o = offer_at(message->source, group_.rank(), message->offer);
    const Block data = message->request->data;
    for (uint64_t i = 0; i < kMostAtOnce && message->got < data.bytes; i++) {
        const size_t at = message->got;
        const Block piece{data.data + at, std::min(kPieceBytes, data.bytes - at)};
        if (!copy_piece(message->source, o, at, piece)) {
            message->got = 0;
            change_state(o, {State::taken}, State::declined);
            notify(message->source);
            return true;
        }
        message->got += piece.bytes;
    }
    if (message->got < data.bytes) return true;
    // What was read may be another's: see "Single copies".
    if (group_.broken() || group_.lost(message->source)) return false;
    if (!change_state(o, {State::taken}, State::done)) return true;  // abandoned
    notify(message->source);
    ends(message->source).offered[static_cast<size_t>(message->offer)].reset();
    following_--;
    message->offer = -1;
    complete(*message);
    return true;
}

// Copy what is `at` bytes into an offered tensor. False: the kernel refuses.
bool Mailbox::copy_piece(int source, const Offer& offer, size_t at, Block piece) {
    if (offer.from_heap != 0) {
        std::memcpy(piece.data, group_.at(offer.from_heap) + at, piece.bytes);
        return true;
    }
    return group_.copies().permitted &&
           read_from({group_.pid_of(source), offer.from + at}, piece.data, piece.bytes);
}

// The receive of a taken message has ended: its data go through the ring.
void Mailbox::decline(Message& message) {
    Offer& o = offer_at(message.source, group_.rank(), message.offer);
    message.got = 0;
    if (change_state(o, {State::taken}, State::declined)) notify(message.source);
}

}  // namespace dure
