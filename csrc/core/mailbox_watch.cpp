// What can go wrong with a message, looked for each time a waiting rank has slept.
#include <algorithm>

#include "mailbox.h"

namespace dure {

// Whoever waits for it may sleep on the bell of this rank.
void Mailbox::finish(Request& request, Outcome outcome) {
    if (request.ticket->done()) return;
    request.ticket->finish(std::move(outcome));
    notify(group_.rank());
}

// End a request with a status of the group's, or of its own.
void Mailbox::settle(Request& request, Status status) {
    Outcome out;
    if (status != Status::aborted && status != Status::interrupted) out = group_.failure();
    out.status = status;
    out.op = request.op;
    if (request.begun && status == Status::interrupted) {
        // Half a message is in the ring: nobody can go on after it.
        out.peer = group_.rank();
        group_.condemn(out);
    }
    finish(request, std::move(out));
    sweep();
}

void Mailbox::fail_all(Status status) {
    std::vector<RequestPtr> all(receives_.begin(), receives_.end());
    for (auto& queue : sends_) all.insert(all.end(), queue.begin(), queue.end());
    for (MessagePtr& m : arriving_) {
        if (m && m->request) all.push_back(m->request);
    }
    for (RequestPtr& r : all) settle(*r, status);
}

// Forget requests that have ended. A message that one of them was to receive waits for another.
void Mailbox::sweep() {
    auto done = [](const RequestPtr& r) { return r->ticket->done(); };
    for (MessagePtr& m : arriving_) {
        if (!m || !m->request || !done(m->request)) continue;
        m->request.reset();
        unexpected_.push_back(m);
    }
    std::erase_if(receives_, done);
    for (auto& queue : sends_) std::erase_if(queue, done);
}

void Mailbox::examine(const RequestPtr& waiter) {
    if (group_.closing()) return fail_all(Status::aborted);
    if (group_.broken()) return fail_all(group_.adopt_verdict());
    const int64_t now = now_ns();
    std::vector<RequestPtr> all = handed_;
    if (waiter) all.push_back(waiter);
    for (const RequestPtr& r : all) {
        if (!r->ticket->done()) examine_one(*r, now);
    }
}

// A peer that ended can still have left a message; so rings were emptied before we came here.
void Mailbox::examine_one(Request& request, int64_t now) {
    Outcome out;
    out.op = request.op;
    out.peer = request.peer;
    int gone = 0, others = 0;
    for (int r = 0; r < group_.size(); r++) {
        if (r == group_.rank() || (request.peer != kAnySource && request.peer != r)) continue;
        others++;
        if (group_.has_left(r)) {
            gone++;
        } else if (group_.lost(r)) {
            if (progress()) return;
            out.status = Status::peer_lost;
            out.peer = r;
            out.detail = group_.fate_of(r);
            group_.condemn(out);
            return fail_all(group_.adopt_verdict());
        }
    }
    if (others > 0 && gone == others && !progress() && !request.ticket->done()) {
        out.status = Status::peer_left;
        finish(request, std::move(out));
        return sweep();  // before anything more is matched with it
    }
    if (request.ticket->done() || now < request.deadline_ns) return;
    if (out.peer >= 0) out.missing = {out.peer};
    out.calls = group_.whereabouts(out.missing);
    out.status = !request.begun ? Status::late : Status::timeout;
    if (request.begun) group_.condemn(out);
    finish(request, std::move(out));
    sweep();
}

}  // namespace dure
