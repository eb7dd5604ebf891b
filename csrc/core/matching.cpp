// Which message goes to which receive.
//
// Note "Matching". A message goes to the first receive that was posted for its sender (or for any)
// and its tag; a receive gets the first such message that came. What came before its receive waits
// in `unexpected_`. A receive whose length or dtype differs from its message fails; the message
// stays, for one that fits. So does the message for which there is no memory: the receives that
// wait for its sender fail. A message that its sender gave up never was: the receive that had it
// takes its old place among those that wait.
#include <algorithm>

#include "mailbox.h"

namespace dure {

// Fail the receives that make us read from `from`.
void Mailbox::refuse_all(int from) {
    for (const PostedPtr& r : receives_) {
        if (r->peer != from && r->peer != kAnySource) continue;
        Outcome out;
        out.status = Status::no_memory;
        out.op = Op::recv;
        out.peer = from;
        finish(*r, std::move(out));
    }
    sweep();
}

bool Mailbox::fits(const Message& message, const Posted& request) const {
    return message.envelope.bytes == request.data.bytes && message.envelope.dtype == request.dtype;
}

// Find the receive for a message that begins to arrive. False: none yet; the message is kept.
bool Mailbox::accept(const MessagePtr& message) {
    for (auto it = receives_.begin(); it != receives_.end();) {
        Posted& r = **it;
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

void Mailbox::refuse(Posted& request, const Message& message) {
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
    Posted& r = *message.request;
    const std::byte* data = message.sender ? message.sender->data.data : message.kept.data();
    const bool elsewhere = message.sender || !message.kept.empty();
    if (elsewhere && r.data.bytes) std::memcpy(r.data.data, data, r.data.bytes);
    if (message.trial.number != Trial::kNone) note_time(message);
    r.set_source(message.source);
    finish(r, {});
    if (message.sender) finish(*message.sender, {});
}

// Give a new receive the message that has waited for it, or queue it.
void Mailbox::post_receive(const PostedPtr& request) {
    for (auto it = unexpected_.begin(); it != unexpected_.end(); ++it) {
        const MessagePtr message = *it;
        Message& m = *message;
        if (m.envelope.tag != request->tag) continue;
        if (request->peer != kAnySource && request->peer != m.source) continue;
        if (!fits(m, *request)) return refuse(*request, m);
        m.request = request;
        unexpected_.erase(it);
        if (m.complete()) complete(m);
        if (m.offer >= 0) take(m);  // if not, follow_all finds what has become of it
        return;
    }
    // Mostly the last; not where it had a message before.
    auto after = receives_.end();
    while (after != receives_.begin() && (*std::prev(after))->number > request->number) --after;
    receives_.insert(after, request);
}

// A message to this very rank.
void Mailbox::deliver_to_self(const PostedPtr& request) {
    auto message = std::make_shared<Message>();
    const Block data = request->data;
    message->envelope = {data.bytes, request->tag, request->dtype, Kind::whole, 0};
    message->source = group_.rank();
    message->got = data.bytes;
    message->sender = request;
    if (accept(message)) return complete(*message);
    if (must_wait(data.bytes)) return;
    message->kept.assign(data.data, data.data + data.bytes);
    message->sender.reset();
    finish(*request, {});
}

// Forget a message that its sender gave up.
void Mailbox::drop(const MessagePtr& gone) {
    const MessagePtr message = gone;  // which may be our only one
    std::erase(unexpected_, message);
    MessagePtr& current = arriving_[static_cast<size_t>(message->source)];
    if (current == message) current.reset();
    if (message->offer >= 0) {
        ends(message->source).offered[static_cast<size_t>(message->offer)].reset();
        following_--;
        offer_at(message->source, group_.rank(), message->offer)
            .state.store(0, std::memory_order_release);
    }
    if (const PostedPtr request = std::move(message->request)) {
        request->begun = false;
        post_receive(request);
    }
}

// A receive ends before its message has come to an end: keep what has come for another. False: that
// cannot be.
bool Mailbox::keep_received(Message& message) {
    if (message.offer < 0 && message.kept.empty()) {
        try {
            message.kept.resize(message.envelope.bytes);
        } catch (const std::exception&) {
            return false;
        }
        if (message.got) {
            std::memcpy(message.kept.data(), message.request->data.data, message.got);
        }
    }
    return true;
}

}  // namespace dure
