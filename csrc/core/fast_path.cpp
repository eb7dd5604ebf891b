// Messages that need no request.
//
// Note "Fast path". Most messages are simple: nothing else is under way between the two ranks,
// the sender finds room for the whole message, the receiver finds it complete at the head of the
// ring, or waits for it a moment. Then the sender writes its line or lines and raises `head`, and
// the receiver reads `head` and copies the data to where they belong. No request is made, nothing
// is queued, no memory is allocated. Everything else takes the slow
// path (mailbox.cpp).
//
// The receiver waits without the lock. It must not while other requests of this rank need someone
// to drive them, or an earlier receive could want the same message: then it takes the slow path
// too.
#include <algorithm>

#include "backoff.h"
#include "mailbox.h"

namespace dure {

// Send what fits into the ring as a whole. False: the slow path.
bool Mailbox::send_at_once(Block data, DType dtype, int to, int tag) {
    const auto hold = locked();
    const auto at = static_cast<size_t>(to);
    if (stopping_ || to == group_.rank() || group_.broken() || !sends_[at].empty()) return false;
    if (offers(data)) return false;
    uint64_t head = group_.ring(group_.rank(), to).head.load(std::memory_order_relaxed);
    const size_t wanted = sizeof(Envelope) + data.bytes;
    if (room(to, head, wanted + kPad) < wanted + kPad) return false;
    const Envelope envelope{data.bytes, tag, dtype, Kind::whole, 0};
    const size_t step = piece(data.bytes);
    size_t done = std::min(step, data.bytes);
    write(to, head, &envelope, data.data, done);
    for (head += sizeof envelope + round_up(done, kPad); done < data.bytes;
         done += step, head += step) {
        write(to, head, nullptr, data.data + done, std::min(step, data.bytes - done));
    }
    return true;
}

// Receive a message that is complete, or comes soon. False: the slow path.
bool Mailbox::receive_at_once(Block data, DType dtype, int from, int tag) {
    if (from == kAnySource || from == group_.rank()) return false;
    const std::atomic<uint64_t>& read = ends_[static_cast<size_t>(from)].read;
    const std::atomic<uint64_t>& head = group_.ring(from, group_.rank()).head;
    group_.show_core();
    for (Backoff backoff(group_);;) {
        switch (look(data, dtype, from, tag)) {
            case Look::taken:
                return true;
            case Look::otherwise:
                return false;
            case Look::nothing:
                break;
        }
        while (head.load(std::memory_order_acquire) == read.load(std::memory_order_relaxed)) {
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

Mailbox::Look Mailbox::look(Block data, DType dtype, int from, int tag) {
    const auto hold = locked();
    if (!undisturbed(from)) return Look::otherwise;
    const Ring& ring = group_.ring(from, group_.rank());
    const uint64_t at = ends_[static_cast<size_t>(from)].read.load(std::memory_order_relaxed);
    const uint64_t head = ring.head.load(std::memory_order_acquire);
    if (head == at) return Look::nothing;
    Envelope envelope;
    std::memcpy(&envelope, ring.data + at % group_.ring_bytes(), sizeof envelope);
    const bool expected = envelope.tag == tag && envelope.bytes == data.bytes &&
                          envelope.dtype == dtype && envelope.kind == Kind::whole;
    if (!expected || head - at < sizeof envelope + data.bytes) return Look::otherwise;
    read(from, at + sizeof envelope, data.data, data.bytes);
    advance(from, sizeof envelope + data.bytes);
    show_read(from);
    return Look::taken;
}

}  // namespace dure
