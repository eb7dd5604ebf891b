// Watching: what a waiting rank looks at after each slice of its sleep (see "Waiting" in
// barrier.cpp).
//
// The world is examined for a reason not to wait any longer: broken by another rank, left, dead,
// too late, closed here, interrupted. So nobody outlives a dead peer by more than a slice and a
// poll(2).
#include "channel.h"

namespace dure {

namespace {

constexpr int64_t kInterruptNs = 100'000'000;
constexpr int64_t kAnswerNs = 1'000'000'000;  // a thread of a busy machine may not run for long

const char* describe(char activity) {
    switch (activity) {
        case 'T':
        case 't':
            return "its process is stopped (by a signal, or a debugger)";
        case 'D':
            return "its process waits for a device";
        default:
            return "";
    }
}

void add(std::string& text, const std::string& more) {
    if (!more.empty()) text.append(text.empty() ? "" : "; ").append(more);
}

}  // namespace

// Look for a reason not to wait any longer for arrival `tick` of all.
Status Channel::examine(Wait& wait, uint32_t tick) {
    if (group_.closing()) return Status::aborted;
    if (group_.broken()) return group_.adopt_abort();
    Outcome out;
    out.op = op_;
    out.channel = index_;
    out.seq = seq_;
    for (int r = 0; r < size_; r++) {
        if (arrived(r, tick)) continue;
        out.missing.push_back(r);
        bool left = group_.has_left(r), dead = !left && group_.lost(r);
        if ((left || dead) && !arrived(r, tick)) {
            out.status = dead ? Status::peer_lost : Status::peer_left;
            out.peer = r;
        }
    }
    if (out.missing.empty()) return Status::ok;
    if (out.status != Status::ok) {
        out.missing.clear();
        if (out.status == Status::peer_lost) out.detail = group_.exit_of(out.peer);
        return group_.abort(std::move(out));
    }
    int64_t now = now_ns();
    if (now - started_ns_ > group_.timeout_ns()) {
        out.status = Status::timeout;
        out.peer = out.missing.front();
        out.calls = group_.whereabouts(out.missing);
        for (size_t i = 0; i < out.missing.size(); i++) {
            std::string call = last_call(out.missing[i]);
            add(call, out.calls[i]);
            out.calls[i] = std::move(call);
        }
        return group_.abort(std::move(out));
    }
    if (now - wait.asked_ns > kInterruptNs) {
        wait.asked_ns = now;
        if (group_.interrupted()) {
            out.status = Status::interrupted;
            out.peer = rank_;
            out.missing.clear();
            return group_.abort(std::move(out));
        }
    }
    return Status::ok;
}

std::vector<std::string> Group::whereabouts(const std::vector<int>& ranks) {
    std::vector<std::string> texts;
    const int64_t deadline = now_ns() + kAnswerNs;
    for (int r : ranks) {
        std::string text;
        if (const std::shared_ptr<Process>& peer = process(r)) {
            const uint32_t question = peer->ask(block(r).place.load());
            text = describe(peer->activity());
            // What is stopped does not answer, unless it was woken in between.
            const int64_t until = text.empty() ? deadline : now_ns();
            const std::string at = peer->await_answer(question, until);
            if (!at.empty()) add(text, "now at " + at);
        }
        texts.push_back(std::move(text));
    }
    return texts;
}

// What a rank that is missing in the running collective called last.
//
// It may arrive while we look. Its slot of this collective is written before it arrives and stays
// until we have left, so that can be read once it has arrived. The other slot it may rewrite as
// soon as it has arrived and seen the others: so of that we read only `site`, which is atomic, and
// look again whether it has arrived. What it called there is what we called, or there had been an
// error.
std::string Channel::last_call(int rank) const {
    const auto reached = [](const OpSlot& s) { return s.tick.load(std::memory_order_acquire); };
    const size_t now = seq_ & 1, before = now ^ 1;
    // Our own other slot has the tick with which the operation before this one ended.
    const OpSlot& last = block(rank_).slot[before];
    const uint32_t ended = reached(last);
    const auto begun = [&] {
        return static_cast<int32_t>(reached(block(rank).slot[now]) - ended) > 0;
    };
    const auto text = [&](const char* what, const OpSlot& s, const std::string& site) {
        std::string told = std::string(what).append(name_of(s.op)).append(" #");
        told.append(std::to_string(s.seq));
        if (!site.empty()) told.append(" at ").append(site);
        return told;
    };
    if (!begun()) {
        if (seq_ <= 1) return "it has called nothing on this group yet";
        const bool finished = reached(block(rank).slot[before]) == ended;
        const std::string site = site_of(rank, before);
        std::atomic_thread_fence(std::memory_order_acquire);
        if (!begun()) {
            return text("its last call was ", last, site)
                .append(finished ? ", which it finished" : ", which is not finished");
        }
    }
    return text("it is in ", block(rank).slot[now], site_of(rank, now));
}

}  // namespace dure
