// How the ranks of a group come to copy in the same way.
//
// Note "Agreement". Rank 0 puts what its process knows from an earlier group into the header of a
// new segment; a rank that was not in that group counts itself a stranger before it attaches. So
// once all have attached, all know whether the plan holds as it is, as it does where all ranks are
// threads of one process. If not: each admits the others to its memory, barrier; each reads a word
// of every other's memory, and says if it could not, barrier; rank 0 writes the plan, barrier.
#include <algorithm>
#include <mutex>

#include "channel.h"
#include "copying.h"
#include "group.h"
#include "single_copy.h"

namespace dure {

namespace {

// What this process has learned. A forked child knows nothing: it is another process.
std::mutex kept_lock;
CopyPlan kept;
int kept_pid = 0;

CopyPlan kept_plan() {
    std::lock_guard hold(kept_lock);
    return kept_pid == getpid() ? kept : CopyPlan{};
}

void keep(const CopyPlan& plan) {
    std::lock_guard hold(kept_lock);
    kept = plan;
    kept_pid = getpid();
}

}  // namespace

void choose_copies(CopyPlan& plan, int64_t asked) {
    const bool by_length = plan.permitted != 0 && asked >= 0;
    plan.learns = asked == kLearnCopies;
    plan.once_bytes = by_length ? static_cast<uint64_t>(asked) : kNeverCopiedOnce;
}

// Before this rank counts as attached.
void Group::bring_copy_plan() {
    CopyAgreement& agreement = header().copies;
    proof_ = header().nonce + static_cast<uint64_t>(rank_);
    block(rank_).proof = reinterpret_cast<uint64_t>(&proof_);
    const CopyPlan mine = kept_plan();
    if (rank_ == 0) {
        const bool none = single_copies_ == kNoSingleCopies || size_ == 1;
        if (!none) agreement.plan = mine;
        if (mine.host == 0) agreement.plan.permitted = !none;  // if all are of one process
        agreement.plan.cache_bytes = last_cache_bytes();
        choose_copies(agreement.plan, single_copies_);
        agreement.known = none || mine.host != 0;
    } else if (agreement.plan.host != 0 && agreement.plan.host != mine.host) {
        agreement.strangers.fetch_add(1);
    }
}

void Group::agree_on_copies() {
    CopyAgreement& agreement = header().copies;
    std::vector<int> pids;
    for (int r = 0; r < size_; r++) pids.push_back(block(r).pid);
    const bool known = agreement.known && agreement.strangers.load() == 0;
    if (known || std::count(pids.begin(), pids.end(), pids[0]) == size_) {
        copies_ = agreement.plan;
        return;
    }
    admit_peers(pids);
    // Where a barrier fails the group is broken, and nobody copies anything.
    if (channel(0).join() != Status::ok) return;
    if (!may_copy_from_all()) agreement.denied.fetch_add(1);
    if (channel(0).join() != Status::ok) return;
    if (rank_ == 0) {
        agreement.plan.permitted = agreement.denied.load() == 0;
        agreement.plan.host = header().nonce;
        choose_copies(agreement.plan, single_copies_);
    }
    if (channel(0).join() != Status::ok) return;
    copies_ = agreement.plan;
    keep(copies_);
}

bool Group::may_copy_from_all() const {
    for (int r = 0; r < size_; r++) {
        uint64_t word = 0;
        const Remote proof{block(r).pid, block(r).proof};
        if (!read_from(proof, &word, sizeof word)) return false;
        if (word != header().nonce + static_cast<uint64_t>(r)) return false;
    }
    return true;
}

}  // namespace dure
