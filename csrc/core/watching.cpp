// Watching: what a waiting rank looks at after each slice of its sleep (see "Waiting" in sync.cpp).
//
// The world is examined for a reason not to wait any longer: broken by another rank, left, dead,
// too late, closed here, interrupted. So nobody outlives a dead peer by more than a slice and a
// poll(2).
#include "group.h"

namespace dure {

namespace {

constexpr int64_t kInterruptNs = 100'000'000;

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
        out.detail = peers_.fate(out.peer);
        return condemn(std::move(out));
    }
    int64_t now = now_ns();
    if (now - started_ns_ > timeout_ns_) {
        out.status = Status::timeout;
        out.peer = out.missing.front();
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
