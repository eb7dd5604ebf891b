// The bytes of point-to-point messages.
//
// Note "Frames". Each ordered pair of ranks has a ring in the segment: frames of one cache line
// each, and bytes. A frame announces a message (length, tag, dtype, kind), and what its kind says
// comes with it, or follows:
//
//     whole    its data
//     pieces   nothing; frames of the kind `piece` follow
//     piece    that many of the data of the message before; a length of 0 means that the sender has
//              given up: there was no message
//     offer    nothing; the data are where the offer tells (rendezvous.cpp)
//     payload  nothing; pieces follow, of a message that was an offer before
//
// Data of up to kFrameBytes lie in their frame, so that a small message is one line that goes from
// one core to the other; longer ones lie among the ring's bytes, at multiples of a line.
//
// A frame is there when its number is: the sender writes all else first. Numbers count the frames
// of a ring, so what an earlier round has left is never taken for a frame to come. The receiver
// looks at the one frame that is next, and at nothing else.
//
// The sender writes as much as there is room for and goes on when the receiver has made more; so a
// message may be larger than the ring, and one of up to three quarters of it is sent whether or not
// anybody waits for it. Room for one more frame is always left, so that who has begun can give up.
//
// The receiver takes bytes only while some receive could match that sender. When a message is
// announced, the first posted receive for its sender and tag gets the data, straight into its
// tensor; without one they go to private memory ("unexpected") until a receive asks
// (matching.cpp).
//
// Neither side reads or writes more of the other's lines than it must. The sender asks how far the
// receiver is only when the room that it knows of has been used up; the receiver says so only after
// each quarter of the frames or of the bytes. A sender waits for room for a whole piece, which is
// at most a quarter, and so always comes.
//
// Cost of S bytes: S written and S read by each side, and one line a frame; pieces of at most
// 64 KiB keep both busy at once.
#include <algorithm>
#include <new>

#include "copying.h"
#include "mailbox.h"

namespace dure {

namespace {

constexpr size_t kLeastPiece = 16 * 1024;
constexpr size_t kPieces = 4;   // of a message that is not large
constexpr size_t kQuarter = 4;  // of the ring: the receiver's step

QuickerWay reading;  // long messages

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

// Whether there is room for `wanted`, and for one more frame.
bool Mailbox::has_room(int to, Stretch wanted) {
    Ends& e = ends(to);
    const auto fits = [&] {
        return e.written.frames + wanted.frames + 1 <= e.taken.frames + group_.ring_frames() &&
               e.written.bytes + wanted.bytes <= e.taken.bytes + group_.ring_bytes();
    };
    if (fits()) return true;
    const Ring& ring = group_.ring(group_.rank(), to);
    e.taken = {ring.frames_read.load(std::memory_order_acquire),
               ring.bytes_read.load(std::memory_order_acquire)};
    return fits();
}

// What data of `bytes` take with one frame.
Mailbox::Stretch Mailbox::in_one(size_t bytes) {
    return {1, bytes <= kFrameBytes ? 0 : round_up(bytes, kLine)};
}

// What a message of `bytes` takes in pieces, at most.
Mailbox::Stretch Mailbox::in_pieces(size_t bytes) const {
    return {2 + bytes / piece(bytes), round_up(bytes, kLine)};
}

// Write a frame with `n` bytes of data, for which there is room.
void Mailbox::write(int to, const Envelope& envelope, const std::byte* data, size_t n) {
    Ends& e = ends(to);
    Frame& frame = group_.ring(group_.rank(), to).frames[e.written.frames % group_.ring_frames()];
    if (n > kFrameBytes) {
        const size_t capacity = group_.ring_bytes();
        const size_t at = e.written.bytes % capacity, first = std::min(n, capacity - at);
        std::byte* bytes = group_.ring_data(group_.rank(), to);
        std::memcpy(bytes + at, data, first);
        if (n > first) std::memcpy(bytes, data + first, n - first);
        e.written.bytes += round_up(n, kLine);
        last_to_ = to;
        last_bytes_ = n;
    } else if (n > 0) {
        std::memcpy(frame.inlined, data, n);
    }
    frame.envelope = envelope;
    frame.number.store(static_cast<uint32_t>(++e.written.frames), std::memory_order_release);
    notify(to);
}

// Write a frame that announces a message, none of whose data come with it.
void Mailbox::announce(int to, const Envelope& envelope, Trial trial) {
    static_assert(sizeof trial <= kFrameBytes);
    if (trial.number != Trial::kNone) trial.began_ns = now_ns();
    write(to, envelope, reinterpret_cast<const std::byte*>(&trial), sizeof trial);
}

void Mailbox::write_piece(int to, const std::byte* data, size_t n) {
    write(to, {n, 0, DType::opaque, Kind::piece, 0}, data, n);
}

// The frame that comes next from `from`; null if it has not come.
const Frame* Mailbox::next_frame(int from) const {
    const uint64_t at =
        ends_[static_cast<size_t>(from)].frames_read.load(std::memory_order_relaxed);
    const Frame& frame = group_.ring(from, group_.rank()).frames[at % group_.ring_frames()];
    const bool here = frame.number.load(std::memory_order_acquire) == static_cast<uint32_t>(at + 1);
    return here ? &frame : nullptr;
}

// Read bytes that have come; `large`: of a message that no cache holds.
void Mailbox::read(int from, std::byte* data, size_t n, bool large) {
    const size_t capacity = group_.ring_bytes();
    const size_t at = ends(from).bytes_read % capacity, first = std::min(n, capacity - at);
    const std::byte* bytes = group_.ring_data(from, group_.rank());
    const auto copy = [&](std::byte* to, const std::byte* out_of, size_t length) {
        if (large) {
            large_copy(reading, to, out_of, length);
        } else {
            std::memcpy(to, out_of, length);
        }
    };
    copy(data, bytes + at, first);
    if (n > first) copy(data + first, bytes, n - first);
}

// We are through with more of the ring from `from`; tell the sender, if it is worth it.
void Mailbox::consume(int from, Stretch what) {
    Ends& e = ends(from);
    const uint64_t frames = e.frames_read.load(std::memory_order_relaxed) + what.frames;
    e.frames_read.store(frames, std::memory_order_relaxed);
    e.bytes_read += what.bytes;
    if (frames - e.shown.frames < group_.ring_frames() / kQuarter &&
        e.bytes_read - e.shown.bytes < group_.ring_bytes() / kQuarter) {
        return;
    }
    e.shown = {frames, e.bytes_read};
    Ring& ring = group_.ring(from, group_.rank());
    ring.frames_read.store(frames, std::memory_order_release);
    ring.bytes_read.store(e.bytes_read, std::memory_order_release);
    notify(from);
}

// How much of a message goes at once: little enough that both sides soon work at the same time.
size_t Mailbox::piece(size_t bytes) const {
    const size_t most = group_.ring_bytes() / kQuarter;
    return std::clamp(round_up(bytes / kPieces, kLine), std::min(kLeastPiece, most), most);
}

// ---- sending ------------------------------------------------------------------------------------

// Offer the queued messages for `to`, or write them, as far as there is room.
bool Mailbox::push(int to) {
    auto& queue = sends_[static_cast<size_t>(to)];
    bool moved = false;
    while (!queue.empty()) {
        const PostedPtr& first = queue.front();
        Posted& r = *first;
        if (!r.begun && !r.payload && r.way.once) {
            if (offer(to, first)) {
                queue.pop_front();
                moved = true;
                continue;
            }
            // All places are taken. If no message there can go through the ring instead, they are
            // free only after their receives, which may come after that of this message, or of one
            // behind it. So this one goes through the ring, and the receiver keeps it.
            if (some_offer_fits(to) || must_wait(r.data.bytes) || !has_room(to, {1, 0})) break;
            r.way = {};
        }
        if (!r.begun) {
            if (!has_room(to, {1, 0})) break;
            const Kind kind = r.payload ? Kind::payload : Kind::pieces;
            const auto place = static_cast<uint16_t>(std::max(r.offer, 0));
            announce(to, {r.data.bytes, r.tag, r.dtype, kind, place}, r.way.trial);
            r.begun = moved = true;
            if (r.data.bytes != 0) continue;
        }
        const size_t left = r.data.bytes - r.moved;
        // What nobody waits for goes as a whole, if there is room.
        const bool whole = r.payload && has_room(to, in_one(left));
        const size_t n = whole ? left : std::min(left, piece(r.data.bytes));
        if (n > 0) {
            if (!has_room(to, in_one(n))) break;
            write_piece(to, r.data.data + r.moved, n);
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
void Mailbox::cut_short(Posted& request) { write_piece(request.peer, nullptr, 0); }

// ---- receiving ----------------------------------------------------------------------------------

// Read what has come from `from`.
bool Mailbox::pull(int from) {
    MessagePtr& current = arriving_[static_cast<size_t>(from)];
    for (bool moved = false;; moved = true) {
        if (!current) {
            const Frame* frame = next_frame(from);
            if (!frame) return moved;
            if (!begin(from, *frame)) return true;
        } else if (!pull_piece(from, *current)) {
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
bool Mailbox::pull_piece(int from, Message& m) {
    if (m.ahead == 0) {
        const Frame* frame = next_frame(from);
        if (!frame) return false;
        const size_t n = frame->envelope.bytes;
        if (n == 0) {
            drop(arriving_[static_cast<size_t>(from)]);
        } else if (n > kFrameBytes) {
            m.ahead = n;
        } else {
            if (!make_room(from, m)) return false;
            std::memcpy(memory_of(m) + m.got, frame->inlined, n);
            m.got += n;
        }
        consume(from, {1, 0});
        return true;
    }
    if (!make_room(from, m)) return false;
    read(from, memory_of(m) + m.got, m.ahead, exceeds_cache(2 * m.envelope.bytes));
    m.got += m.ahead;
    consume(from, {0, round_up(m.ahead, kLine)});
    m.ahead = 0;
    return true;
}

// A message is announced: find its receive, or the message that it belongs to. False: there is no
// memory for it.
bool Mailbox::begin(int from, const Frame& frame) {
    const Envelope envelope = frame.envelope;
    MessagePtr& current = arriving_[static_cast<size_t>(from)];
    if (envelope.kind == Kind::payload) {
        current = std::move(ends(from).offered[envelope.offer]);
        following_--;
        current->offer = -1;
        current->trial = {};
        offer_at(from, group_.rank(), envelope.offer).state.store(0, std::memory_order_release);
        consume(from, {1, 0});
        return true;
    }
    MessagePtr message;
    try {
        message = std::make_shared<Message>();
        message->envelope = envelope;
        message->source = from;
        if (envelope.kind == Kind::offer) message->offer = envelope.offer;
        if (envelope.kind != Kind::whole) {
            std::memcpy(&message->trial, frame.inlined, sizeof message->trial);
        } else {
            if (envelope.bytes > kFrameBytes) {
                message->ahead = envelope.bytes;
            } else {
                message->kept.assign(frame.inlined, frame.inlined + envelope.bytes);
                message->got = envelope.bytes;
            }
        }
        accept(message);
    } catch (const std::bad_alloc&) {
        refuse_all(from);
        return false;
    }
    consume(from, {1, 0});
    if (envelope.kind != Kind::offer) {
        current = std::move(message);
        return true;
    }
    ends(from).offered[envelope.offer] = message;
    following_++;
    if (message->request) take(*message);  // if not, follow_all finds what has become of it
    return true;
}

// Where the bytes of a message go.
std::byte* Mailbox::memory_of(Message& m) {
    if (!m.request || !m.kept.empty()) return m.kept.data();
    m.request->begun = true;
    return m.request->data.data;
}

// Memory for a message, private if nobody has asked for it. False: there is none.
bool Mailbox::make_room(int from, Message& message) {
    if (message.request) return true;
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
