// What can go wrong with a message, looked for each time a waiting rank has slept.
#include <algorithm>

#include "mailbox.h"

namespace dure {

// Whoever waits for it may sleep on the bell of this rank.
void Mailbox::finish(Posted& request, Outcome outcome) {
    if (request.done()) return;
    request.finish(std::move(outcome));
    notify(group_.rank());
}

// End a request before its message has moved, so that the group is as before: a message is taken
// back, or kept for another receive. If there is no memory to keep it, the group is broken.
void Mailbox::give_up(Posted& request, Outcome outcome) {
    if (request.done()) return;
    const bool over = outcome.status == Status::aborted || group_.broken();
    if (!withdraw(request) && !over) {
        if (outcome.status == Status::late) outcome.status = Status::timeout;
        if (outcome.peer < 0) outcome.peer = group_.rank();
        group_.abort(outcome);
    }
    finish(request, std::move(outcome));
    sweep();
}

// False: it is too late for that.
bool Mailbox::withdraw(Posted& request) {
    if (request.op == Op::send) {
        if (request.begun) {
            cut_short(request);
        } else if (request.offer >= 0 && !retract(request)) {
            finish(request, {});
        }
        std::erase_if(unexpected_,
                      [&](const MessagePtr& m) { return m->sender.get() == &request; });
        return true;
    }
    for (const MessagePtr& m : arriving_) {
        if (m && m->request.get() == &request) return keep_received(*m);
    }
    for (Ends& e : ends_) {
        for (const MessagePtr& m : e.offered) {
            if (!m || m->request.get() != &request) continue;
            decline(*m);
            return true;
        }
    }
    return true;
}

// End a request with a status of the group's, or of its own.
void Mailbox::settle(Posted& request, Status status) {
    Outcome out;
    if (status != Status::aborted && status != Status::interrupted) out = group_.failure();
    out.status = status;
    out.op = request.op;
    give_up(request, std::move(out));
}

void Mailbox::fail_all(Status status) {
    std::vector<PostedPtr> all(receives_.begin(), receives_.end());
    for (auto& queue : sends_) all.insert(all.end(), queue.begin(), queue.end());
    for (MessagePtr& m : arriving_) {
        if (m && m->request) all.push_back(m->request);
    }
    for (Ends& e : ends_) {
        for (const PostedPtr& r : e.given) {
            if (r) all.push_back(r);
        }
        for (const MessagePtr& m : e.offered) {
            if (m && m->request) all.push_back(m->request);
        }
    }
    for (const MessagePtr& m : unexpected_) {
        if (m->sender) all.push_back(m->sender);
    }
    for (PostedPtr& r : all) settle(*r, status);
}

// Forget requests that have ended. A message that one of them was to receive waits for another.
void Mailbox::sweep() {
    auto done = [](const PostedPtr& r) { return r->done(); };
    auto release = [&](const MessagePtr& m) {
        if (!m || !m->request || !done(m->request)) return;
        m->request.reset();
        unexpected_.push_back(m);
    };
    for (const MessagePtr& m : arriving_) release(m);
    for (Ends& e : ends_) {
        for (const MessagePtr& m : e.offered) release(m);
    }
    std::erase_if(receives_, done);
    for (auto& queue : sends_) std::erase_if(queue, done);
}

void Mailbox::examine(const PostedPtr& waiter) {
    if (group_.closing()) return fail_all(Status::aborted);
    if (group_.broken()) return fail_all(group_.adopt_abort());
    const int64_t now = now_ns();
    std::vector<PostedPtr> all = handed_;
    if (waiter) all.push_back(waiter);
    for (const PostedPtr& r : all) {
        if (!r->done()) examine_one(*r, now);
    }
}

// A peer that ended can still have left a message; so rings were emptied before we came here.
void Mailbox::examine_one(Posted& request, int64_t now) {
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
            out.detail = group_.exit_of(r);
            group_.abort(out);
            return fail_all(group_.adopt_abort());
        }
    }
    if (others > 0 && gone == others && !progress() && !request.done()) {
        out.status = Status::peer_left;
        return give_up(request, std::move(out));
    }
    if (request.done() || now < request.deadline_ns) return;
    if (out.peer >= 0) out.missing = {out.peer};
    out.calls = group_.whereabouts(out.missing);
    out.status = Status::late;
    give_up(request, std::move(out));
}

}  // namespace dure
