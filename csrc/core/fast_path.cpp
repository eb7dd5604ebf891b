// Messages that need no request.
//
// Note "Fast path". Most messages are simple: nothing else is under way between the two ranks,
// the sender finds room for the whole message, the receiver finds it in the next frame, or waits
// for it a moment. Then the sender writes its line or lines, and the receiver copies the data to
// where they belong. No request is made, nothing is queued, no memory is allocated. Everything else
// takes the slow path (mailbox.cpp).
//
// The receiver waits without the lock. It must not while other requests of this rank need someone
// to drive them, or an earlier receive could want the same message: then it takes the slow path
// too.
//
// Before a core may write a line that another has read, it must be told that the other has dropped
// it, which takes as long as fetching it. A receiver that waits has the time for that: it fetches,
// for writing, the lines where the next message would go if it were as long as the last.
#include <algorithm>

#include "backoff.h"
#include "mailbox.h"

namespace dure {

namespace {

constexpr size_t kLinesALook = 4;
constexpr size_t kMostAhead = 64 * 1024;

}  // namespace

// Send a message that the ring has room for. False: the slow path; `way` is set if it was chosen.
bool Mailbox::send_at_once(Block data, DType dtype, int to, int tag,
                           std::optional<MessageWay>& way) {
    const auto hold = locked();
    const auto at = static_cast<size_t>(to);
    if (stopping_ || to == group_.rank() || group_.broken() || !sends_[at].empty()) return false;
    way = way_of(data, to);
    if (way->once) return false;
    const size_t step = piece(data.bytes);
    if (data.bytes <= step) {
        if (!has_room(to, in_one(data.bytes))) return false;
        write(to, {data.bytes, tag, dtype, Kind::whole, 0}, data.data, data.bytes);
        return true;
    }
    if (!has_room(to, in_pieces(data.bytes))) return false;
    announce(to, {data.bytes, tag, dtype, Kind::pieces, 0}, way->trial);
    for (size_t done = 0; done < data.bytes; done += step) {
        write_piece(to, data.data + done, std::min(step, data.bytes - done));
    }
    return true;
}

// Receive a message that is complete, or comes soon. False: the slow path.
bool Mailbox::receive_at_once(Block data, DType dtype, int from, int tag) {
    if (from == kAnySource || from == group_.rank()) return false;
    group_.show_core();
    Block lines;
    for (Backoff backoff(group_);;) {
        switch (look(data, dtype, from, tag, lines)) {
            case Look::taken:
                return true;
            case Look::otherwise:
                return false;
            case Look::nothing:
                break;
        }
        while (!next_frame(from)) {
            own_some(lines);
            if (!backoff.pause([&] { return group_.shares_core(from); })) {
                return false;
            }
        }
    }
}

// Nothing else is under way that this rank should care for while it waits for `from`.
bool Mailbox::undisturbed(int from) const {
    if (stopping_ || group_.broken()) return false;
    if (!receives_.empty() || !unexpected_.empty() || !handed_.empty()) return false;
    if (given_ > 0 || following_ > 0) return false;
    if (arriving_[static_cast<size_t>(from)]) return false;
    for (const auto& queue : sends_) {
        if (!queue.empty()) return false;
    }
    return true;
}

// Where the next message that resembles the last one would be written.
Block Mailbox::lines_ahead() {
    if (last_to_ < 0) return {};
    const Ends& e = ends(last_to_);
    const size_t capacity = group_.ring_bytes(), at = e.written.bytes % capacity;
    const size_t known = e.taken.bytes + capacity - e.written.bytes;
    return {group_.ring_data(group_.rank(), last_to_) + at,
            std::min({round_up(last_bytes_, kLine), known, capacity - at, kMostAhead})};
}

// Fetch some of `lines` for writing.
#if defined(__x86_64__)
[[gnu::target("prfchw")]]  // without it the compiler fetches for reading
#endif
void Mailbox::own_some(Block& lines) {
    const size_t now = std::min(kLinesALook * kLine, lines.bytes);
    for (size_t i = 0; i < now; i += kLine) __builtin_prefetch(lines.data + i, 1);
    lines.data += now;
    lines.bytes -= now;
}

Mailbox::Look Mailbox::look(Block data, DType dtype, int from, int tag, Block& lines) {
    const auto hold = locked();
    if (!undisturbed(from)) return Look::otherwise;
    const Frame* frame = next_frame(from);
    if (!frame) {
        lines = lines_ahead();
        return Look::nothing;
    }
    const Envelope& e = frame->envelope;
    if (e.tag != tag || e.bytes != data.bytes || e.dtype != dtype || e.kind != Kind::whole) {
        return Look::otherwise;
    }
    if (data.bytes > kFrameBytes) {
        read(from, data.data, data.bytes);
    } else if (data.bytes > 0) {
        std::memcpy(data.data, frame->inlined, data.bytes);
    }
    consume(from, in_one(data.bytes));
    return Look::taken;
}

}  // namespace dure
