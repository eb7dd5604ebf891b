// The bytes of point-to-point messages.
//
// Note "Streams". Each ordered pair of ranks has a ring in the segment: a byte stream of messages,
// each an envelope (length, tag, dtype) and its data, padded to 16 bytes. The sender writes as much
// as there is room for and goes on when the receiver has made more; so a message may be larger than
// the ring, and one of up to three quarters of it is sent whether or not anybody waits for it.
//
// The receiver takes bytes only while some receive could match that sender. When an envelope
// arrives, the first posted receive for its sender and tag gets the data, straight into its
// tensor; without one they go to private memory ("unexpected") until a receive asks. A receive
// whose length or dtype differs from its message fails; the message stays, for one that fits. So
// does the message for which there is no memory: the receives that wait for its sender fail.
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

}  // namespace

// Wake `rank` if it sleeps. The fence makes sure that either we see the sleeper, or it sees what we
// have just written (see "Waiting" in sync.cpp).
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
    uint64_t& tail = ends_[static_cast<size_t>(to)].seen_tail;
    const size_t capacity = group_.ring_bytes();
    if (capacity - (head - tail) < wanted) {
        tail = group_.ring(group_.rank(), to).tail.load(std::memory_order_acquire);
    }
    return capacity - (head - tail);
}

// Write an envelope, if there is one, and data, for which there is room.
void Mailbox::write(int to, uint64_t head, const Envelope* envelope, const std::byte* data,
                    size_t n) {
    Ring& ring = group_.ring(group_.rank(), to);
    const size_t capacity = group_.ring_bytes();
    if (envelope) {
        std::memcpy(ring.data + head % capacity, envelope, sizeof *envelope);
        head += sizeof *envelope;
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
    ends_[static_cast<size_t>(from)].read.store(at + round_up(n, kPad), std::memory_order_relaxed);
}

// Tell the sender how far we have read, if it is worth it.
void Mailbox::show_read(int from) {
    Ends& ends = ends_[static_cast<size_t>(from)];
    const uint64_t read = ends.read.load(std::memory_order_relaxed);
    if (read - ends.shown < group_.ring_bytes() / kQuarter) return;
    ends.shown = read;
    group_.ring(from, group_.rank()).tail.store(read, std::memory_order_release);
    notify(from);
}

// How much of a message goes at once: little enough that both sides soon work at the same time.
size_t Mailbox::piece(size_t bytes) const {
    const size_t most = group_.ring_bytes() / kQuarter;
    return std::clamp(round_up(bytes / kPieces, kPad), std::min(kLeastPiece, most), most);
}

// ---- messages -----------------------------------------------------------------------------------

// Move what can be moved now; true if anything was.
bool Mailbox::progress() {
    if (stopping_ || group_.closing() || group_.broken()) return false;
    bool moved = false;
    for (int to = 0; to < group_.size(); to++) {
        if (!sends_[static_cast<size_t>(to)].empty()) moved |= push(to);
    }
    bool any = false;
    for (const RequestPtr& r : receives_) any = any || r->peer == kAnySource;
    for (int from = 0; from < group_.size(); from++) {
        bool wanted = any;
        for (const RequestPtr& r : receives_) wanted = wanted || r->peer == from;
        const MessagePtr& message = arriving_[static_cast<size_t>(from)];
        wanted = wanted || (message && message->request);
        if (wanted && from != group_.rank()) moved |= pull(from);
    }
    return moved;
}

// Write the queued messages for `to`, as far as there is room.
bool Mailbox::push(int to) {
    auto& queue = sends_[static_cast<size_t>(to)];
    const Ring& ring = group_.ring(group_.rank(), to);
    bool moved = false;
    while (!queue.empty()) {
        Request& r = *queue.front();
        const uint64_t head = ring.head.load(std::memory_order_relaxed);
        const Envelope envelope{r.data.bytes, r.tag, r.dtype};
        const size_t first = r.begun ? 0 : sizeof envelope;
        const size_t n = std::min(r.data.bytes - r.moved, piece(r.data.bytes));
        const size_t wanted = first + round_up(n, kPad);
        if (room(to, head, wanted) < wanted) break;
        write(to, head, first ? &envelope : nullptr, r.data.data + r.moved, n);
        r.begun = true;
        r.moved += n;
        moved = true;
        if (r.moved < r.data.bytes) continue;
        finish(r, {});
        queue.pop_front();
    }
    return moved;
}

// Read what has come from `from`.
bool Mailbox::pull(int from) {
    MessagePtr& current = arriving_[static_cast<size_t>(from)];
    const Ring& ring = group_.ring(from, group_.rank());
    for (bool moved = false;; moved = true) {
        uint64_t at = ends_[static_cast<size_t>(from)].read.load(std::memory_order_relaxed);
        const uint64_t head = ring.head.load(std::memory_order_acquire);
        if (!current) {
            if (head == at) return moved;
            if (!begin(from, at)) return true;
            at += sizeof(Envelope);
        }
        Message& m = *current;
        const size_t missing = m.envelope.bytes - m.got;
        const size_t n =
            std::min({missing, static_cast<size_t>(head - at), group_.ring_bytes() / kQuarter});
        if (n == 0 && missing > 0) return moved;
        if (!m.request && !make_room(from, m)) return true;
        read(from, at, (m.request && m.kept.empty() ? m.request->data.data : m.kept.data()) + m.got,
             n);
        m.got += n;
        if (m.request) m.request->begun = true;
        show_read(from);
        if (!m.complete()) continue;
        if (m.request) complete(m);
        current.reset();
    }
}

// A message's first bytes are here: find its receive. False: there is no memory for it.
bool Mailbox::begin(int from, uint64_t at) {
    try {
        auto message = std::make_shared<Message>();
        std::memcpy(&message->envelope,
                    group_.ring(from, group_.rank()).data + at % group_.ring_bytes(),
                    sizeof message->envelope);
        message->source = from;
        accept(message);
        arriving_[static_cast<size_t>(from)] = std::move(message);
    } catch (const std::bad_alloc&) {
        refuse_all(from);
        return false;
    }
    ends_[static_cast<size_t>(from)].read.store(at + sizeof(Envelope), std::memory_order_relaxed);
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

// Fail the receives that make us read from `from`.
void Mailbox::refuse_all(int from) {
    for (const RequestPtr& r : receives_) {
        if (r->peer != from && r->peer != kAnySource) continue;
        Outcome out;
        out.status = Status::no_memory;
        out.op = Op::recv;
        out.peer = from;
        finish(*r, std::move(out));
    }
    sweep();
}

bool Mailbox::fits(const Message& message, const Request& request) const {
    return message.envelope.bytes == request.data.bytes && message.envelope.dtype == request.dtype;
}

// Find the receive for a message that begins to arrive. False: none yet; the message is kept.
bool Mailbox::accept(const MessagePtr& message) {
    for (auto it = receives_.begin(); it != receives_.end();) {
        Request& r = **it;
        const bool for_it =
            r.tag == message->envelope.tag && (r.peer == kAnySource || r.peer == message->source);
        if (!for_it) {
            ++it;
            continue;
        }
        if (fits(*message, r)) {
            message->request = *it;
            receives_.erase(it);
            return true;
        }
        refuse(r, *message);
        it = receives_.erase(it);  // the next one that was posted may fit
    }
    unexpected_.push_back(message);
    return false;
}

void Mailbox::refuse(Request& request, const Message& message) {
    auto text = [](DType dtype, size_t bytes) {
        return std::string(name_of(dtype)) + "[" + std::to_string(bytes / item_bytes(dtype)) + "]";
    };
    Outcome out;
    out.status = Status::mismatch;
    out.op = Op::recv;
    out.peer = message.source;
    out.calls.resize(2);
    out.calls[0] = "recv(" + text(request.dtype, request.data.bytes) + ", tag " +
                   std::to_string(request.tag) + ")";
    out.calls[1] = "send(" + text(message.envelope.dtype, message.envelope.bytes) + ", tag " +
                   std::to_string(message.envelope.tag) + ")";
    finish(request, std::move(out));
}

// All bytes of a message with a receive are here.
void Mailbox::complete(Message& message) {
    Request& r = *message.request;
    if (!message.kept.empty()) std::memcpy(r.data.data, message.kept.data(), message.kept.size());
    r.ticket->set_source(message.source);
    finish(r, {});
}

// Give a new receive the message that has waited for it, or queue it.
void Mailbox::post_receive(const RequestPtr& request) {
    for (auto it = unexpected_.begin(); it != unexpected_.end(); ++it) {
        Message& m = **it;
        if (m.envelope.tag != request->tag) continue;
        if (request->peer != kAnySource && request->peer != m.source) continue;
        if (!fits(m, *request)) return refuse(*request, m);
        m.request = request;
        if (m.complete()) complete(m);
        unexpected_.erase(it);
        return;
    }
    receives_.push_back(request);
}

void Mailbox::deliver_to_self(Request& request) {
    auto message = std::make_shared<Message>();
    message->envelope = {request.data.bytes, request.tag, request.dtype};
    message->source = group_.rank();
    message->got = request.data.bytes;
    if (accept(message)) {
        if (request.data.bytes) {
            std::memcpy(message->request->data.data, request.data.data, request.data.bytes);
        }
        complete(*message);
    } else {
        message->kept.assign(request.data.data, request.data.data + request.data.bytes);
    }
    finish(request, {});
}

}  // namespace dure
