#include "calibration.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace dure {

namespace {

constexpr int64_t kGiveUpNs = 100'000'000;
constexpr int kYieldEvery = 4096;  // looks; so that two sides on one core come to an end
constexpr int kBatches = 16, kRounds = 32;
constexpr int kShortTries = 24, kLongTries = 8;
constexpr size_t kPiece = 16 * 1024;
// What a single copy costs besides copying: a request and its matching; one barrier more.
constexpr float kOfferUs = 3, kBarrierUs = 0.5;
// The trials' memory has just been written. What a program sends more than once without writing it
// again the kernel copies much quicker, and staging hardly.
constexpr float kFavour = 0.8F;
constexpr float kFarthestUs = 2;  // a line that takes longer was kept from its core

constexpr uint64_t kLeastBytes = 8 * 1024;
// The thresholds where the two ranks were kept from their cores, as on a busy machine. Measured
// ones were from 31 to 122 KiB on all processors so far, with near and with distant cores.
constexpr uint64_t kUnmeasuredBytes = 128 * 1024;

class Side {
  public:
    Side(CopyTrial& trial, int side, int peer_pid, std::byte* const stages[2])
        : mine_(trial.turn[side][0]),
          theirs_(trial.turn[1 - side][0]),
          began_ns_(trial.began_ns),
          side_(side),
          out_(stages[side]),
          in_(stages[1 - side]),
          memory_(kLongTrial, std::byte{1}),
          until_ns_(now_ns() + kGiveUpNs) {
        trial.address[side] = reinterpret_cast<uint64_t>(memory_.data());
        meet();
        peer_ = {peer_pid, trial.address[1 - side]};
    }

    bool failed() const { return failed_; }

    void arrive() { mine_.store(++count_, std::memory_order_release); }
    // Until the other side has come as far as we, but for `lag` arrivals.
    void await(uint32_t lag = 0) {
        for (int looks = 1; !failed_; looks++) {
            const uint32_t seen = theirs_.load(std::memory_order_acquire);
            if (static_cast<int32_t>(seen - count_ + lag) >= 0) return;
            relax();
            if (looks % kYieldEvery != 0) continue;
            failed_ = now_ns() > until_ns_;
            sched_yield();
        }
    }
    void meet() {
        arrive();
        await();
    }

    // The quickest of `tries` with `bytes`, in microseconds.
    template <typename F>
    float quickest(int tries, size_t bytes, F work) {
        int64_t least = INT64_MAX;
        for (int i = 0; i < tries && !failed_; i++) {
            // As a program would: what is sent has been written since it was sent before.
            std::memset(memory_.data(), i, bytes);
            meet();
            began_ns_[side_] = now_ns();
            work();
            meet();
            least = std::min(least, now_ns() - std::min(began_ns_[0], began_ns_[1]));
        }
        return static_cast<float>(least) / 1e3F;
    }
    template <typename F>
    CopyTimes both(F work) {
        CopyTimes times;
        times.short_us = quickest(kShortTries, kShortTrial, [&] { work(kShortTrial); });
        times.long_us = quickest(kLongTries, kLongTrial, [&] { work(kLongTrial); });
        return times;
    }

    void ping_pong() {
        for (int i = 0; i < kRounds; i++) {
            if (side_ == 0) arrive();
            await(side_ == 0 ? 0 : UINT32_MAX);  // side 1: for one more than its own
            if (side_ == 1) arrive();
        }
    }
    // Side 1 puts pieces into its stage, side 0 takes them out meanwhile.
    void message_staged(size_t bytes) {
        const size_t pieces = bytes / kPiece;
        for (size_t k = 0; k < pieces; k++) {
            const size_t at = k * kPiece;
            if (side_ == 1) {
                std::memcpy(out_ + at, memory_.data() + at, kPiece);
                arrive();
            } else {
                arrive();
                await();
                std::memcpy(memory_.data() + at, in_ + at, kPiece);
            }
        }
    }
    // Side 0 reads, side 1 waits.
    void message_single(size_t bytes) {
        if (side_ == 0) copy_once(bytes);
    }
    void exchange_staged(size_t bytes) {
        constexpr size_t kChunk = 128 * 1024;
        const size_t step = std::min(bytes, kChunk);
        std::memcpy(out_, memory_.data(), step);
        for (size_t at = 0; at < bytes; at += step) {
            arrive();
            if (at + step < bytes) std::memcpy(out_ + at + step, memory_.data() + at, step);
            await();
            std::memcpy(memory_.data() + at, in_ + at, step);
        }
    }
    void exchange_single(size_t bytes) { copy_once(bytes); }

  private:
    void copy_once(size_t bytes) {
        if (!failed_) failed_ = !read_from(peer_, memory_.data(), bytes);
    }

    Word& mine_;
    Word& theirs_;
    int64_t* const began_ns_;
    const int side_;
    std::byte* const out_;
    const std::byte* const in_;
    std::vector<std::byte> memory_;
    const int64_t until_ns_;
    Remote peer_;
    uint32_t count_ = 0;
    bool failed_ = false;
};

CopyTimes times(float factor, const CopyTimes& t) {
    return {factor * t.short_us, factor * t.long_us};
}

// From how many bytes on `single` is quicker than `staged`, where it pays `more_us` besides.
uint64_t crossing(const CopyTimes& staged, CopyTimes single, float more_us) {
    const float at_short = single.short_us + more_us - staged.short_us;
    const float at_long = single.long_us + more_us - staged.long_us;
    if (at_long >= 0) return kNeverCopiedOnce;
    const float slope = (at_long - at_short) / static_cast<float>(kLongTrial - kShortTrial);
    const float from = static_cast<float>(kShortTrial) - (slope < 0 ? at_short / slope : 0);
    if (!(from > static_cast<float>(kLeastBytes))) return kLeastBytes;
    return static_cast<uint64_t>(from);
}

}  // namespace

bool measure_copies(CopyTrial& trial, int side, int peer_pid, std::byte* const stages[2],
                    CopyPlan& plan) {
    Side me(trial, side, peer_pid, stages);
    plan.line_us =
        me.quickest(kBatches, 0, [&] { me.ping_pong(); }) / static_cast<float>(2 * kRounds);
    plan.staged_message = me.both([&](size_t n) { me.message_staged(n); });
    plan.staged_exchange = me.both([&](size_t n) { me.exchange_staged(n); });
    if (plan.permitted) {
        plan.single_message = me.both([&](size_t n) { me.message_single(n); });
        plan.single_exchange = me.both([&](size_t n) { me.exchange_single(n); });
    }
    plan.measured = !me.failed() && plan.line_us < kFarthestUs;
    if (!plan.measured) plan = CopyPlan{plan.host, plan.permitted};
    return plan.measured;
}

void choose_copies(CopyPlan& plan, int64_t asked, int num_ranks) {
    plan.message_bytes = plan.shared_bytes = plan.block_bytes = kNeverCopiedOnce;
    plan.within_cache = asked < 0;
    plan.learns = asked == kMeasureCopies;
    if (!plan.permitted || asked == kNoSingleCopies) return;
    if (asked >= 0) {
        plan.message_bytes = plan.shared_bytes = plan.block_bytes = static_cast<uint64_t>(asked);
        return;
    }
    if (!plan.measured) {
        plan.message_bytes = plan.shared_bytes = plan.block_bytes = kUnmeasuredBytes;
        return;
    }
    const auto n = static_cast<float>(num_ranks);
    // A message copied once is announced, taken, and known to be taken.
    plan.message_bytes =
        crossing(plan.staged_message, plan.single_message, kOfferUs + 2 * plan.line_us);
    plan.block_bytes =
        crossing(plan.staged_exchange, times(kFavour, plan.single_exchange), kBarrierUs);
    plan.shared_bytes = num_ranks == 2
                            ? plan.block_bytes
                            : crossing(plan.staged_exchange,
                                       times(2 * (n - 1) / n, plan.single_exchange), kBarrierUs);
}

}  // namespace dure
