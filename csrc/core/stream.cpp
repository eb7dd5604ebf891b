// The bytes of point-to-point messages.
//
// Note "Streams". Each ordered pair of ranks has a ring in the segment: a byte stream of messages,
// each an envelope (length, tag, dtype) and its data, padded to 16 bytes. The sender writes as much
// as there is room for and goes on when the receiver has made more; so a message may be larger than
// the ring, and one that fits is sent whether or not anybody waits for it.
//
// The receiver takes bytes only while some receive could match that sender. When an envelope
// arrives, the first posted receive for its sender and tag gets the data, straight into its
// tensor; without one they go to private memory ("unexpected") until a receive asks. A receive
// whose length or dtype differs from its message fails; the message stays, for one that fits.
//
// Cost of S bytes: S written and S read by each side; pieces of 64 KiB keep both busy at once.
#include <algorithm>

#include "mailbox.h"

namespace dure {

namespace {

constexpr size_t kPiece = 64 * 1024;
constexpr size_t kPad = 16;
constexpr size_t kEnvelope = 16;

// Copy between linear memory and a ring at position `at`.
void ring_write(Ring& ring, size_t capacity, uint64_t at, const std::byte* from, size_t n) {
    size_t begin = at % capacity, first = std::min(n, capacity - begin);
    std::memcpy(ring.data + begin, from, first);
    if (n > first) std::memcpy(ring.data, from + first, n - first);
}

void ring_read(const Ring& ring, size_t capacity, uint64_t at, std::byte* to, size_t n) {
    size_t begin = at % capacity, first = std::min(n, capacity - begin);
    std::memcpy(to, ring.data + begin, first);
    if (n > first) std::memcpy(to + first, ring.data, n - first);
}

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
    Ring& ring = group_.ring(group_.rank(), to);
    const size_t capacity = group_.ring_bytes();
    bool moved = false;
    while (!queue.empty()) {
        Request& r = *queue.front();
        const uint64_t head = ring.head.load(std::memory_order_relaxed);
        const size_t room = capacity - (head - ring.tail.load(std::memory_order_acquire));
        size_t written = 0;
        if (r.moved == 0) {
            if (room < kEnvelope + kPad) break;
            Envelope envelope{r.data.bytes, r.tag, r.dtype};
            std::byte raw[kEnvelope] = {};
            std::memcpy(raw, &envelope, sizeof envelope);
            ring_write(ring, capacity, head, raw, kEnvelope);
            written = kEnvelope;
        }
        const size_t at = r.moved + written - kEnvelope;
        const size_t n = std::min({r.data.bytes - at, (room - written) / kPad * kPad, kPiece});
        if (written == 0 && n == 0 && at < r.data.bytes) break;
        if (n) ring_write(ring, capacity, head + written, r.data.data + at, n);
        r.moved += written + n;
        ring.head.store(head + written + round_up(n, kPad), std::memory_order_release);
        moved = true;
        notify(to);
        if (at + n == r.data.bytes) {
            r.ticket->finish({});
            queue.pop_front();
        }
    }
    return moved;
}

// Read what has come from `from`.
bool Mailbox::pull(int from) {
    MessagePtr& current = arriving_[static_cast<size_t>(from)];
    Ring& ring = group_.ring(from, group_.rank());
    const size_t capacity = group_.ring_bytes();
    bool moved = false;
    for (;;) {
        uint64_t tail = ring.tail.load(std::memory_order_relaxed);
        const uint64_t head = ring.head.load(std::memory_order_acquire);
        if (!current) {
            if (head - tail < kEnvelope) return moved;
            current = std::make_shared<Message>();
            std::byte raw[kEnvelope];
            ring_read(ring, capacity, tail, raw, kEnvelope);
            std::memcpy(&current->envelope, raw, sizeof current->envelope);
            current->source = from;
            if (!accept(current)) current->kept.resize(current->envelope.bytes);
            tail += kEnvelope;
        }
        Message& m = *current;
        const bool direct = m.request && m.kept.empty();
        std::byte* base = direct ? m.request->data.data : m.kept.data();
        const size_t n =
            std::min({m.envelope.bytes - m.got, static_cast<size_t>(head - tail), kPiece});
        if (n) ring_read(ring, capacity, tail, base + m.got, n);
        m.got += n;
        if (m.request) m.request->moved += n;
        const uint64_t read = tail + round_up(n, kPad);
        const bool progressed = read != ring.tail.load(std::memory_order_relaxed);
        ring.tail.store(read, std::memory_order_release);
        if (progressed) notify(from);
        moved = moved || progressed;
        if (m.complete()) {
            if (m.request) complete(m);
            current.reset();
        } else if (!progressed) {
            return moved;
        }
    }
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
    fail(request, std::move(out));
}

// All bytes of a message with a receive are here.
void Mailbox::complete(Message& message) {
    Request& r = *message.request;
    if (!message.kept.empty()) std::memcpy(r.data.data, message.kept.data(), message.kept.size());
    r.ticket->set_source(message.source);
    r.ticket->finish({});
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
    request.ticket->finish({});
}

}  // namespace dure
