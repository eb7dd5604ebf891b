// The bytes of point-to-point messages.
//
// Note "Frames". Each ordered pair of ranks has a ring in the segment: a byte stream of messages,
// each an envelope (length, tag, dtype, kind) and what its kind says, padded to 16 bytes:
//
//     whole    its data; the sender found room for all of them before it began
//     pieces   pieces, each a word with its length and that many of its data; a length of 0 in
//              place of the next piece means that the sender has given up: there was no message
//     offer    nothing; the data are where the offer tells (rendezvous.cpp)
//     payload  pieces, of a message that was an offer before
//
// The sender writes as much as there is room for and goes on when the receiver has made more; so a
// message may be larger than the ring, and one of up to three quarters of it is sent whether or not
// anybody waits for it. Room for one more word is always left, so that who has begun can give up.
//
// The receiver takes bytes only while some receive could match that sender. When an envelope
// arrives, the first posted receive for its sender and tag gets the data, straight into its tensor;
// without one they go to private memory ("unexpected") until a receive asks (matching.cpp).
//
// Neither side reads or writes more of the other's lines than it must. The sender asks how far the
// receiver is only when the room that it knows of has been used up; the receiver says so only after
// each quarter of the ring. A sender waits for room for a whole piece, which is at most a quarter,
// and so always comes.
//
// Cost of S bytes: S written and S read by each side; pieces of at most 64 KiB keep both busy at
// once.
#include <algorithm>
#include <new>

#include "mailbox.h"

namespace dure {

namespace {

constexpr size_t kLeastPiece = 16 * 1024;
constexpr size_t kPieces = 4;   // of a message that is not large
constexpr size_t kQuarter = 4;  // of the ring: the receiver's step

// What precedes a piece.
struct PieceWord {
    uint64_t bytes;  // 0: the sender has given up
    uint64_t unused = 0;
};
static_assert(sizeof(PieceWord) == kPad);

}  // namespace

// Wake `rank` if it sleeps. The fence makes sure that either we see the sleeper, or it sees what we
// have just written (see "Waiting" in barrier.cpp).
void Mailbox::notify(int rank) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    RankBlock& block = group_.block(rank);
    if (block.sleepers.load(std::memory_order_relaxed) != 0) {
        block.bell.fetch_add(1);
        futex_wake_all(block.bell);
    }
}

// ---- bytes to and from a ring -------------------------------------------------------------------

// The room in the ring to `to`; exact only if it is less than `wanted`.
uint64_t Mailbox::room(int to, uint64_t head, size_t wanted) {
    uint64_t& tail = ends(to).seen_tail;
    const size_t capacity = group_.ring_bytes();
    if (capacity - (head - tail) < wanted) {
        tail = group_.ring(group_.rank(), to).tail.load(std::memory_order_acquire);
    }
    return capacity - (head - tail);
}

// Write a frame of kPad bytes, if there is one, and data, for which there is room.
void Mailbox::write(int to, uint64_t head, const void* frame, const std::byte* data, size_t n) {
    Ring& ring = group_.ring(group_.rank(), to);
    const size_t capacity = group_.ring_bytes();
    if (frame) {
        std::memcpy(ring.data + head % capacity, frame, kPad);
        head += kPad;
    }
    const size_t begin = head % capacity, first = std::min(n, capacity - begin);
    if (first) std::memcpy(ring.data + begin, data, first);
    if (n > first) std::memcpy(ring.data, data + first, n - first);
    ring.head.store(head + round_up(n, kPad), std::memory_order_release);
    notify(to);
}

// Read data that have come, without their padding.
void Mailbox::read(int from, uint64_t at, std::byte* data, size_t n) {
    const Ring& ring = group_.ring(from, group_.rank());
    const size_t capacity = group_.ring_bytes();
    const size_t begin = at % capacity, first = std::min(n, capacity - begin);
    if (first) std::memcpy(data, ring.data + begin, first);
    if (n > first) std::memcpy(data + first, ring.data, n - first);
}

// We have read `bytes` more of the ring from `from`.
void Mailbox::advance(int from, size_t bytes) {
    std::atomic<uint64_t>& read = ends(from).read;
    read.store(read.load(std::memory_order_relaxed) + round_up(bytes, kPad),
               std::memory_order_relaxed);
}

// Tell the sender how far we have read, if it is worth it.
void Mailbox::show_read(int from) {
    const uint64_t read = ends(from).read.load(std::memory_order_relaxed);
    if (read - ends(from).shown < group_.ring_bytes() / kQuarter) return;
    ends(from).shown = read;
    group_.ring(from, group_.rank()).tail.store(read, std::memory_order_release);
    notify(from);
}

// How much of a message goes at once: little enough that both sides soon work at the same time.
size_t Mailbox::piece(size_t bytes) const {
    const size_t most = group_.ring_bytes() / kQuarter;
    return std::clamp(round_up(bytes / kPieces, kPad), std::min(kLeastPiece, most), most);
}

// ---- sending ------------------------------------------------------------------------------------

// Offer the queued messages for `to`, or write them, as far as there is room.
bool Mailbox::push(int to) {
    auto& queue = sends_[static_cast<size_t>(to)];
    const Ring& ring = group_.ring(group_.rank(), to);
    bool moved = false;
    while (!queue.empty()) {
        const PostedPtr& first = queue.front();
        Posted& r = *first;
        if (!r.begun && !r.payload && offers(r.data)) {
            if (!offer(to, first)) break;
            queue.pop_front();
            moved = true;
            continue;
        }
        const uint64_t head = ring.head.load(std::memory_order_relaxed);
        if (!r.begun) {
            if (room(to, head, 2 * kPad) < 2 * kPad) break;
            const Envelope envelope{r.data.bytes, r.tag, r.dtype,
                                    r.payload ? Kind::payload : Kind::pieces,
                                    static_cast<uint16_t>(std::max(r.offer, 0))};
            write(to, head, &envelope, nullptr, 0);
            r.begun = moved = true;
            if (r.data.bytes != 0) continue;
        }
        const size_t left = r.data.bytes - r.moved;
        // What nobody waits for goes as a whole, if there is room.
        const bool whole = r.payload && room(to, head, left + 2 * kPad) >= left + 2 * kPad;
        const size_t n = whole ? left : std::min(left, piece(r.data.bytes));
        const size_t wanted = kPad + round_up(n, kPad) + kPad;
        if (n > 0) {
            if (room(to, head, wanted) < wanted) break;
            const PieceWord word{n};
            write(to, head, &word, r.data.data + r.moved, n);
            r.moved += n;
            moved = true;
        }
        if (r.moved < r.data.bytes) continue;
        finish(r, {});
        queue.pop_front();
    }
    return moved;
}

// End a message of which some is in the ring: the receiver forgets it.
void Mailbox::cut_short(Posted& request) {
    const PieceWord none{0};
    const uint64_t head =
        group_.ring(group_.rank(), request.peer).head.load(std::memory_order_relaxed);
    write(request.peer, head, &none, nullptr, 0);
}

// ---- receiving ----------------------------------------------------------------------------------

// Read what has come from `from`.
bool Mailbox::pull(int from) {
    MessagePtr& current = arriving_[static_cast<size_t>(from)];
    const Ring& ring = group_.ring(from, group_.rank());
    for (bool moved = false;; moved = true) {
        const uint64_t at = ends(from).read.load(std::memory_order_relaxed);
        const uint64_t head = ring.head.load(std::memory_order_acquire);
        if (!current) {
            if (head == at) return moved;
            if (!begin(from, at)) return true;
            show_read(from);
        } else if (!pull_piece(from, *current, head)) {
            return moved;
        }
        if (current && current->complete()) {
            const MessagePtr whole = std::move(current);
            current.reset();
            if (whole->request) complete(*whole);
        }
    }
}

// Read more of a message, or that there is none any more. False: nothing has come, or there is no
// memory for it.
bool Mailbox::pull_piece(int from, Message& m, uint64_t head) {
    const uint64_t at = ends(from).read.load(std::memory_order_relaxed);
    if (head == at) return false;
    if (m.piece == 0) {
        PieceWord word;
        read(from, at, reinterpret_cast<std::byte*>(&word), sizeof word);
        advance(from, sizeof word);
        m.piece = word.bytes;
        if (word.bytes == 0) drop(arriving_[static_cast<size_t>(from)]);
        show_read(from);
        return true;
    }
    const size_t n =
        std::min({m.piece, static_cast<size_t>(head - at), group_.ring_bytes() / kQuarter});
    if (!m.request && !make_room(from, m)) return false;
    read(from, at, (m.request && m.kept.empty() ? m.request->data.data : m.kept.data()) + m.got, n);
    advance(from, n);
    m.got += n;
    m.piece -= n;
    if (m.request) m.request->begun = true;
    show_read(from);
    return true;
}

// An envelope is here: find its receive, or the message that it belongs to. False: there is no
// memory for it.
bool Mailbox::begin(int from, uint64_t at) {
    Envelope envelope;
    read(from, at, reinterpret_cast<std::byte*>(&envelope), sizeof envelope);
    MessagePtr& current = arriving_[static_cast<size_t>(from)];
    if (envelope.kind == Kind::payload) {
        current = std::move(ends(from).offered[envelope.offer]);
        following_--;
        current->offer = -1;
        offer_at(from, group_.rank(), envelope.offer).claims.store(0, std::memory_order_release);
        advance(from, sizeof envelope);
        return true;
    }
    MessagePtr message;
    try {
        message = std::make_shared<Message>();
        message->envelope = envelope;
        message->source = from;
        if (envelope.kind == Kind::whole) message->piece = envelope.bytes;
        if (envelope.kind == Kind::offer) message->offer = envelope.offer;
        accept(message);
    } catch (const std::bad_alloc&) {
        refuse_all(from);
        return false;
    }
    advance(from, sizeof envelope);
    if (envelope.kind != Kind::offer) {
        current = std::move(message);
        return true;
    }
    ends(from).offered[envelope.offer] = message;
    following_++;
    if (message->request) take(*message);  // if not, follow_all finds what has become of it
    return true;
}

// Private memory for a message that nobody has asked for. False: there is none.
bool Mailbox::make_room(int from, Message& message) {
    if (message.kept.size() == message.envelope.bytes) return true;
    try {
        message.kept.resize(message.envelope.bytes);
        return true;
    } catch (const std::exception&) {  // too little memory, or more than any memory
        refuse_all(from);
        return false;
    }
}

}  // namespace dure
