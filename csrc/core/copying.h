// Copies of user data.
//
// Note "Streaming". A plain copy first reads the lines it is about to overwrite, and leaves them in
// the cache in place of others. Where a result is so large that its beginning is gone from the
// cache before anyone reads it, both are waste: non-temporal stores write whole lines past the
// cache. They lose where the lines are in the cache already, or will be read soon; so staging
// buffers and tensors that are reduced in place are never streamed into.
//
// Note "Side by side". What the processor reads ahead by itself ends with the page. So long copies
// take several pages at a time, some lines of each in turn, and ask for those of the next pages
// meanwhile: more lines are under way from another core's cache, or from memory, at once.
//
// Note "Found out by trying". Both ways are slower than the C library's copy on some processors.
// Where `rep movsb` writes complete lines without reading them first, the C library is up to three
// times as fast; elsewhere it is half as fast. On a virtual machine this can change with the cores
// that it runs on. So a process tries both with its first copies of a kind, and again after every
// thousand, and then uses the one whose fastest try was faster.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "futex.h"

namespace dure {

// Which of two ways to copy is the quicker one now, for one kind of copies.
//
// Threads: any may copy at the same time. A try that another thread overwrites, or that ends after
// the last one, is lost, so the slower way may be used until the next tries.
class QuickerWay {
  public:
    // Copy `bytes` with `plain()` or `other()`, which do the same.
    template <typename Plain, typename Other>
    void copy(size_t bytes, Plain plain, Other other) {
        const bool counts = bytes >= kLeastBytes;
        const uint32_t number =
            counts ? copies_.fetch_add(1, std::memory_order_relaxed) % kPeriod : kPeriod;
        const bool tries = number < kTries;
        const bool takes_other =
            tries ? number % 2 == 1 : other_is_quicker_.load(std::memory_order_relaxed);
        const int64_t began_ns = tries ? now_ns() : 0;
        if (takes_other) {
            other();
        } else {
            plain();
        }
        if (tries)
            note(number, static_cast<float>(now_ns() - began_ns) / static_cast<float>(bytes));
    }

  private:
    static constexpr size_t kLeastBytes = 8 * 1024;  // shorter ones are not timed
    static constexpr uint32_t kTries = 8, kPeriod = 1024;

    void note(uint32_t number, float ns_per_byte) {
        std::atomic<float>& least = least_[number % 2];
        const bool first = number < 2;
        if (first || ns_per_byte < least.load(std::memory_order_relaxed)) {
            least.store(ns_per_byte, std::memory_order_relaxed);
        }
        if (number + 1 == kTries) {
            other_is_quicker_.store(least_[1].load() < least_[0].load(), std::memory_order_relaxed);
        }
    }

    std::atomic<uint32_t> copies_{0};
    std::atomic<bool> other_is_quicker_{false};
    static constexpr float kNone = std::numeric_limits<float>::infinity();
    std::atomic<float> least_[2] = {kNone, kNone};  // ns per byte of this period's tries
};

// The size of the last cache, 32 MiB at most. It may differ between processes of one machine, whose
// cores may have different caches.
size_t last_cache_bytes();

inline bool exceeds_cache(size_t bytes) { return bytes > last_cache_bytes(); }

// Copy with non-temporal stores where the machine has them; complete for other ranks at the
// caller's next release, as any copy. The ranges do not overlap.
void stream_copy(std::byte* to, const std::byte* from, size_t bytes);

constexpr size_t kSideBySide = 4;  // pages

// As `stream_copy`, of many ranges, pages of which are copied side by side; complete after
// `finish`.
class StreamedRanges {
  public:
    void add(std::byte* to, const std::byte* from, size_t bytes);
    void finish();

  private:
    void copy_pages();

    std::byte* to_[kSideBySide];
    const std::byte* from_[kSideBySide];
    size_t pages_ = 0;  // that wait to be copied
};

// Copy to or from memory that no core's cache holds: as the C library does it, or streamed.
void large_copy(QuickerWay& way, std::byte* to, const std::byte* from, size_t bytes);

// Copy what is not in this core's cache: as the C library does it, or side by side. `more` bytes
// behind it will be copied next. The ranges do not overlap.
void fetch_copy(QuickerWay& way, std::byte* to, const std::byte* from, size_t bytes,
                size_t more = 0);

}  // namespace dure
