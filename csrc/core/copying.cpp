#include "copying.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
#include <immintrin.h>
#define DURE_STREAMS 1
#endif

namespace dure {

// A large last cache is shared with others: a virtual machine reports that of the whole processor.
size_t last_cache_bytes() {
    constexpr size_t kMost = 32 * 1024 * 1024;
    static const long known = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return known > 0 ? std::min(static_cast<size_t>(known), kMost) : kMost;
}

#if defined(DURE_STREAMS)

namespace {

constexpr size_t kLineBytes = 64;
constexpr size_t kAhead = 1024;  // bytes read ahead
constexpr size_t kPageBytes = 4096;

// One line to an aligned place. (Wider stores gain nothing: they meet in the same buffer.)
inline void stream_line(std::byte* to, const std::byte* from) {
    const auto* in = reinterpret_cast<const __m128i*>(from);
    auto* out = reinterpret_cast<__m128i*>(to);
    for (int k = 0; k < 4; k++) _mm_stream_si128(out + k, _mm_loadu_si128(in + k));
}

inline void copy_line(std::byte* to, const std::byte* from) {
    const auto* in = reinterpret_cast<const __m128i*>(from);
    auto* out = reinterpret_cast<__m128i*>(to);
    for (int k = 0; k < 4; k++) _mm_storeu_si128(out + k, _mm_loadu_si128(in + k));
}

inline void fetch_line(const std::byte* from) {
    _mm_prefetch(reinterpret_cast<const char*>(from), _MM_HINT_T1);
}

void stream_lines(std::byte* to, const std::byte* from, size_t lines) {
    for (; lines > 0; lines--, to += kLineBytes, from += kLineBytes) {
        _mm_prefetch(reinterpret_cast<const char*>(from + kAhead), _MM_HINT_T0);
        stream_line(to, from);
    }
}

}  // namespace

// Pages first, of which several are copied at a time; what is left goes line by line.
void StreamedRanges::add(std::byte* to, const std::byte* from, size_t bytes) {
    const size_t misfit = reinterpret_cast<uintptr_t>(to) % kLineBytes;
    const size_t head = std::min(misfit ? kLineBytes - misfit : 0, bytes);
    std::memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= kPageBytes; bytes -= kPageBytes, to += kPageBytes, from += kPageBytes) {
        to_[pages_] = to;
        from_[pages_] = from;
        if (++pages_ == kSideBySide) copy_pages();
    }
    const size_t lines = bytes / kLineBytes, middle = lines * kLineBytes;
    stream_lines(to, from, lines);
    std::memcpy(to + middle, from + middle, bytes - middle);
}

// Two lines of each page in turn.
void StreamedRanges::copy_pages() {
    for (size_t at = 0; at < kPageBytes; at += 2 * kLineBytes) {
        for (size_t k = 0; k < kSideBySide; k++) {
            stream_line(to_[k] + at, from_[k] + at);
            stream_line(to_[k] + at + kLineBytes, from_[k] + at + kLineBytes);
        }
    }
    pages_ = 0;
}

void StreamedRanges::finish() {
    for (size_t k = 0; k < pages_; k++) {
        stream_lines(to_[k], from_[k], kPageBytes / kLineBytes);
    }
    pages_ = 0;
    _mm_sfence();  // non-temporal stores are not ordered by a release
}

namespace {

void copy_side_by_side(std::byte* to, const std::byte* from, size_t bytes, size_t more) {
    constexpr size_t kBlock = kSideBySide * kPageBytes;
    for (; bytes >= kBlock; bytes -= kBlock, to += kBlock, from += kBlock) {
        const bool ahead = bytes + more >= 2 * kBlock;
        for (size_t at = 0; at < kPageBytes; at += 2 * kLineBytes) {
            for (size_t k = at; k < kBlock; k += kPageBytes) {
                if (ahead) {
                    fetch_line(from + kBlock + k);
                    fetch_line(from + kBlock + k + kLineBytes);
                }
                copy_line(to + k, from + k);
                copy_line(to + k + kLineBytes, from + k + kLineBytes);
            }
        }
    }
    std::memcpy(to, from, bytes);
}

}  // namespace

void fetch_copy(QuickerWay& way, std::byte* to, const std::byte* from, size_t bytes, size_t more) {
    way.copy(
        bytes, [&] { std::memcpy(to, from, bytes); },
        [&] { copy_side_by_side(to, from, bytes, more); });
}

#else

void StreamedRanges::add(std::byte* to, const std::byte* from, size_t bytes) {
    std::memcpy(to, from, bytes);
}

void StreamedRanges::finish() {}

void fetch_copy(QuickerWay&, std::byte* to, const std::byte* from, size_t bytes, size_t) {
    std::memcpy(to, from, bytes);
}

#endif

void stream_copy(std::byte* to, const std::byte* from, size_t bytes) {
    StreamedRanges one;
    one.add(to, from, bytes);
    one.finish();
}

void large_copy(QuickerWay& way, std::byte* to, const std::byte* from, size_t bytes) {
    way.copy(bytes, [&] { std::memcpy(to, from, bytes); }, [&] { stream_copy(to, from, bytes); });
}

}  // namespace dure
