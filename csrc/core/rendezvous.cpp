// Messages that are copied once.
//
// Note "Rendezvous". A large message is not put into the ring: its envelope goes there, and names
// one of kOffers places beside it, an Offer, that tells where the data lie. When a receive for it
// is posted the receiver takes the offer, and the data are copied straight into its tensor
// (single_copy.h). Both sides do that: the message is cut into pieces, the receiver reads them from
// the front on, the sender, if it is there, writes from the back, until all are claimed. So between
// two ranks that both wait a message takes half the time of one copy. The receiver says when all
// pieces are there, and only then is the send over.
//
// One word, `claims`, holds the offer's state and how many pieces each side has claimed; it is only
// changed by compare-and-exchange once the offer has been made:
//
//     free -> offered            by the sender
//     offered -> taken           by the receiver, whose tensor's address is in the offer now
//     taken -> done              by the receiver: all pieces are there
//     done -> free               by the sender, whose request has ended
//     offered, taken -> declined by who may not, or cannot, copy: the data go through the ring
//     offered -> streamed        by the sender: as declined, but before anybody has asked
//     offered, declined, streamed -> withdrawn    by the sender, whose request has ended in vain
//     taken -> abandoned         likewise, amid the copying
//     declined, streamed -> free by the receiver, when the data begin to come through the ring
//     withdrawn, abandoned -> free    by the receiver, which forgets the message
//
// So an end of either side in between leaves nothing behind: a message that was withdrawn never
// was; a receive that has lost its message is posted again. What nobody can take back is a piece
// that the sender is just writing. A receive whose time is over then breaks the group; the memory
// may still change for as long as the sender needs for one piece.
//
// A sender need not wait for its receive where the message would fit into the ring: when nobody has
// taken the offer within kOfferNs, its data follow through the ring ("streamed").
//
// What lies in a symmetric heap, the other side has mapped: then a piece is a plain copy, and
// nobody need be asked for permission.
//
// Cost of S bytes between two that wait: S / 2 moved by each; two lines to announce, take and end.
#include <sched.h>

#include <algorithm>

#include "mailbox.h"

namespace dure {

namespace {

constexpr int64_t kOfferNs = 200'000;
constexpr int64_t kPieceNs = 100'000'000;  // for one, at most; it takes microseconds
constexpr size_t kShares = 8;              // pieces of a message that is not large
constexpr size_t kLeastShare = 32 * 1024, kMostShare = 256 * 1024;
constexpr uint64_t kMostAtOnce = 8;  // pieces, between looks at other traffic
// From here on it pays to wake a sender that sleeps, so that it helps.
constexpr size_t kWorthWaking = 256 * 1024;

enum class State : uint8_t {
    free,
    offered,
    taken,
    done,
    withdrawn,
    streamed,
    declined,
    abandoned,
};

// The word `claims`, taken apart.
struct Claims {
    State state;
    uint64_t front = 0, back = 0;

    static constexpr int kFrontAt = 8, kBackAt = 36;
    static constexpr uint64_t kCount = (uint64_t{1} << (kBackAt - kFrontAt)) - 1;

    static Claims of(uint64_t word) {
        return {static_cast<State>(word & 0xFF), word >> kFrontAt & kCount, word >> kBackAt};
    }
    uint64_t word() const {
        return static_cast<uint64_t>(state) | front << kFrontAt | back << kBackAt;
    }
};

Claims claims_of(const Offer& offer) {
    return Claims::of(offer.claims.load(std::memory_order_acquire));
}

// Change `seen` into `wanted`, or find out what it is now.
bool change(Offer& offer, Claims& seen, Claims wanted) {
    uint64_t word = seen.word();
    if (offer.claims.compare_exchange_strong(word, wanted.word(), std::memory_order_acq_rel)) {
        return true;
    }
    seen = Claims::of(word);
    return false;
}

// Go from a state among `from` to `to`; false if it is in none of them.
bool change_state(Offer& offer, std::initializer_list<State> from, State to) {
    for (Claims seen = claims_of(offer);;) {
        if (std::find(from.begin(), from.end(), seen.state) == from.end()) return false;
        if (change(offer, seen, {to, seen.front, seen.back})) return true;
    }
}

size_t share_of(size_t bytes) {
    return std::clamp(round_up(bytes / kShares, kPage), kLeastShare, kMostShare);
}

uint64_t shares_of(size_t bytes) { return (bytes + share_of(bytes) - 1) / share_of(bytes); }

// Piece `i` of a message of `bytes`.
struct Piece {
    Piece(size_t bytes, uint64_t i)
        : at(i * share_of(bytes)), length(std::min(share_of(bytes), bytes - at)) {}
    size_t at, length;
};

}  // namespace

// Whether a message may leave only when its receive is there.
bool Mailbox::must_wait(size_t bytes) const {
    const size_t eager = eager_bytes_.load(std::memory_order_relaxed);
    return eager == 0 || bytes > eager;
}

bool Mailbox::offers(Block data) const {
    if (data.bytes >= group_.copies().message_bytes || must_wait(data.bytes)) return true;
    return data.bytes >= kZeroCopyBytes && group_.find_in_heap(data.data, data.bytes) != 0;
}

// Copy between `mine` and what lies `at` bytes into a tensor of the peer's. False: that cannot be.
bool Mailbox::copy_piece(int peer, uint64_t address, uint64_t place, size_t at, Block mine,
                         bool reads) {
    if (place != 0) {
        std::byte* theirs = group_.at(place) + at;
        std::memcpy(reads ? mine.data : theirs, reads ? theirs : mine.data, mine.bytes);
        return true;
    }
    if (!group_.copies().permitted) return false;
    const Remote there{group_.pid_of(peer), address + at};
    return reads ? read_from(there, mine.data, mine.bytes) : write_to(there, mine.data, mine.bytes);
}

// ---- the sender ---------------------------------------------------------------------------------

// Make an offer of the message. False: there is no place for it now.
bool Mailbox::offer(int to, const PostedPtr& request) {
    auto& given = ends(to).given;
    if (!has_room(to, {1, 0})) return false;
    for (size_t k = 0; k < kOffers; k++) {
        Offer& o = offer_at(group_.rank(), to, static_cast<int>(k));
        if (given[k] || claims_of(o).state != State::free) continue;
        o.from = reinterpret_cast<uint64_t>(request->data.data);
        o.from_heap = request->data.bytes >= kZeroCopyBytes
                          ? group_.find_in_heap(request->data.data, request->data.bytes)
                          : 0;
        o.given.store(0, std::memory_order_relaxed);
        o.claims.store(Claims{State::offered}.word(), std::memory_order_release);
        const Envelope envelope{request->data.bytes, request->tag, request->dtype, Kind::offer,
                                static_cast<uint16_t>(k)};
        write(to, envelope, nullptr, 0);
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

// See what has become of an offer, and write pieces of it if it has been taken.
bool Mailbox::serve(int to, size_t place) {
    PostedPtr& given = ends(to).given[place];
    Offer& o = offer_at(group_.rank(), to, static_cast<int>(place));
    const Block data = given->data;
    const uint64_t pieces = shares_of(data.bytes);
    Claims seen = claims_of(o);
    if (seen.state == State::done) {
        const PostedPtr request = std::move(given);
        given_--;
        o.claims.store(Claims{State::free}.word(), std::memory_order_relaxed);
        finish(*request, {});
        return true;
    }
    if (seen.state == State::declined) {
        send_payload(to, place);
        return true;
    }
    bool moved = false;
    const bool may = seen.state == State::taken && (group_.copies().permitted || o.to_heap != 0);
    for (uint64_t i = 0; may && i < kMostAtOnce;) {
        if (seen.state != State::taken || seen.front + seen.back >= pieces) break;
        if (!change(o, seen, {State::taken, seen.front, seen.back + 1})) continue;
        const Piece piece(data.bytes, pieces - ++seen.back);
        const Block mine{data.data + piece.at, piece.length};
        if (!copy_piece(to, o.to, o.to_heap, piece.at, mine, false)) {
            change_state(o, {State::taken}, State::declined);
        }
        o.given.fetch_add(1, std::memory_order_release);
        notify(to);
        moved = true;
        i++;
    }
    return moved;
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

// Take back the offer of a request that ends in vain. False: it was taken to the end just now.
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
        if (!back) o.claims.store(Claims{State::free}.word(), std::memory_order_relaxed);
    }
    notify(request.peer);
    return back;
}

// ---- the receiver -------------------------------------------------------------------------------

// Take the offer for the message's receive. False: it is no longer on offer.
bool Mailbox::take(Message& message) {
    Offer& o = offer_at(message.source, group_.rank(), message.offer);
    const Block data = message.request->data;
    const bool may = group_.copies().permitted || o.from_heap != 0;
    o.to = reinterpret_cast<uint64_t>(data.data);
    o.to_heap = data.bytes >= kZeroCopyBytes ? group_.find_in_heap(data.data, data.bytes) : 0;
    if (!change_state(o, {State::offered}, may ? State::taken : State::declined)) return false;
    if (may) message.request->begun = true;
    if (!may || message.envelope.bytes >= kWorthWaking) notify(message.source);
    return true;
}

// Look after all messages that are on offer to this rank.
bool Mailbox::follow_all() {
    bool moved = false;
    for (int from = 0; from < group_.size(); from++) {
        for (size_t k = 0; k < kOffers; k++) {
            const MessagePtr message = ends(from).offered[k];
            if (!message) continue;
            const State now = claims_of(offer_at(from, group_.rank(), static_cast<int>(k))).state;
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

// Read pieces of a message that has been taken, and end it when all are there.
bool Mailbox::copy_taken(const MessagePtr& message) {
    Offer& o = offer_at(message->source, group_.rank(), message->offer);
    const Block data = message->request->data;
    const uint64_t pieces = shares_of(data.bytes);
    bool moved = false;
    Claims seen = claims_of(o);
    for (uint64_t i = 0; i < kMostAtOnce;) {
        if (seen.state != State::taken || seen.front + seen.back >= pieces) break;
        if (!change(o, seen, {State::taken, seen.front + 1, seen.back})) continue;
        const Piece piece(data.bytes, seen.front++);
        const Block mine{data.data + piece.at, piece.length};
        moved = true;
        i++;
        if (copy_piece(message->source, o.from, o.from_heap, piece.at, mine, true)) continue;
        change_state(o, {State::taken}, State::declined);
        notify(message->source);
        return moved;
    }
    seen = claims_of(o);
    const bool all =
        seen.front + seen.back == pieces && o.given.load(std::memory_order_acquire) == seen.back;
    if (seen.state != State::taken || !all) return moved;
    // What was read may be another's: see "Single copies".
    if (group_.broken() || group_.lost(message->source)) return false;
    if (!change(o, seen, {State::done, seen.front, seen.back})) return true;
    notify(message->source);
    ends(message->source).offered[static_cast<size_t>(message->offer)].reset();
    following_--;
    message->offer = -1;
    message->got = data.bytes;
    complete(*message);
    return true;
}

// The message is not wanted any more by its receive: let its data go through the ring. False: the
// sender is writing a piece, and does not come to an end.
bool Mailbox::decline(Message& message) {
    Offer& o = offer_at(message.source, group_.rank(), message.offer);
    const int64_t until = now_ns() + kPieceNs;
    for (Claims seen = claims_of(o); seen.state == State::taken;) {
        if (o.given.load(std::memory_order_acquire) == seen.back) {
            if (change(o, seen, {State::declined, seen.front, seen.back})) notify(message.source);
        } else if (group_.lost(message.source)) {
            return true;
        } else if (now_ns() > until) {
            return false;
        } else {
            sched_yield();
            seen = claims_of(o);
        }
    }
    return true;
}

}  // namespace dure
