// Watching: what a waiting rank looks at after each slice of its sleep (see "Waiting" in sync.cpp).
//
// The world is examined for a reason not to wait any longer: broken by another rank, left, dead,
// too late, closed here, interrupted. So nobody outlives a dead peer by more than a slice and a
// poll(2).
#include "group.h"

namespace dure {

namespace {

constexpr int64_t kInterruptNs = 100'000'000;
constexpr int64_t kAnswerNs = 100'000'000;

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

// Look for a reason not to wait any longer.
Status Group::examine(Wait& wait) {
    if (closing()) return Status::aborted;
    if (broken()) return adopt_verdict();
    Outcome out;
    out.op = op_;
    out.seq = seq_;
    for (int r = 0; r < size_; r++) {
        if (arrived(r)) continue;
        out.missing.push_back(r);
        bool left = has_left(r), dead = !left && lost(r);
        if ((left || dead) && !arrived(r)) {
            out.status = dead ? Status::peer_lost : Status::peer_left;
            out.peer = r;
        }
    }
    if (out.missing.empty()) return Status::ok;
    if (out.status != Status::ok) {
        out.missing.clear();
        if (out.status == Status::peer_lost) out.detail = peers_.fate(out.peer);
        return condemn(std::move(out));
    }
    int64_t now = now_ns();
    if (now - started_ns_ > timeout_ns_) {
        out.status = Status::timeout;
        out.peer = out.missing.front();
        out.calls = whereabouts(out.missing);
        for (size_t i = 0; i < out.missing.size(); i++) {
            std::string call = last_call(out.missing[i]);
            add(call, out.calls[i]);
            out.calls[i] = std::move(call);
        }
        return condemn(std::move(out));
    }
    if (now - wait.asked_ns > kInterruptNs) {
        wait.asked_ns = now;
        if (interrupted()) {
            out.status = Status::interrupted;
            out.peer = rank_;
            out.missing.clear();
            return condemn(std::move(out));
        }
    }
    return Status::ok;
}

std::vector<std::string> Group::whereabouts(const std::vector<int>& ranks) {
    std::vector<uint32_t> questions;
    for (int r : ranks) questions.push_back(ask(block(r)));
    std::vector<std::string> texts;
    const int64_t deadline = now_ns() + kAnswerNs;
    for (size_t i = 0; i < ranks.size(); i++) {
        std::string text = describe(peers_.activity(ranks[i]));
        // What is stopped does not answer, unless it was woken in between.
        const int64_t until = text.empty() ? deadline : now_ns();
        const std::string at = await_answer(block(ranks[i]), questions[i], until);
        if (!at.empty()) add(text, "now at " + at);
        texts.push_back(std::move(text));
    }
    return texts;
}

// What a rank that is missing in the running collective called last.
std::string Group::last_call(int rank) const {
    const auto reached = [](const OpSlot& s) { return s.tick.load(std::memory_order_acquire); };
    const size_t now = seq_ & 1, before = now ^ 1;
    // Our own other slot has the tick with which the operation before this one ended.
    const uint32_t ended = reached(block(rank_).slot[before]);
    const bool begun = static_cast<int32_t>(reached(block(rank).slot[now]) - ended) > 0;
    if (!begun && seq_ == 1) return "it has called nothing on this group yet";
    const size_t which = begun ? now : before;
    const OpSlot& s = block(rank).slot[which];
    std::string text = begun ? "it is in " : "its last call was ";
    text.append(name_of(s.op)).append(" #").append(std::to_string(s.seq));
    const char* site = block(rank).site[which];
    if (site[0]) text.append(" at ").append(site, strnlen(site, kSiteBytes));
    if (!begun)
        text.append(reached(s) == ended ? ", which it finished" : ", which is not finished");
    return text;
}

// Make every sleeper of the group look again.
void Group::wake_everyone() const {
    for (int r = 0; r < size_; r++) {
        RankBlock& b = block(r);
        for (OpSlot& s : b.slot) futex_wake_all(s.tick);
        b.bell.fetch_add(1);
        futex_wake_all(b.bell);
    }
}

}  // namespace dure
