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
bool exceeds_cache(size_t bytes) {
    constexpr size_t kMost = 32 * 1024 * 1024;
    static const long known = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return bytes > (known > 0 ? std::min(static_cast<size_t>(known), kMost) : kMost);
}

#if defined(DURE_STREAMS)

namespace {

constexpr size_t kLineBytes = 64;
constexpr size_t kAhead = 1024;  // bytes read ahead
constexpr size_t kPageBytes = 4096;
constexpr size_t kPages = 4;  // that are copied side by side

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

// Whole lines: pages side by side, two lines of each in turn; what is left goes line by line.
void stream_lines(std::byte* to, const std::byte* from, size_t lines) {
    constexpr size_t kBlock = kPages * kPageBytes;
    for (; lines >= kBlock / kLineBytes;
         lines -= kBlock / kLineBytes, to += kBlock, from += kBlock) {
        for (size_t at = 0; at < kPageBytes; at += 2 * kLineBytes) {
            for (size_t k = at; k < kBlock; k += kPageBytes) {
                stream_line(to + k, from + k);
                stream_line(to + k + kLineBytes, from + k + kLineBytes);
            }
        }
    }
    for (; lines > 0; lines--, to += kLineBytes, from += kLineBytes) {
        _mm_prefetch(reinterpret_cast<const char*>(from + kAhead), _MM_HINT_T0);
        stream_line(to, from);
    }
}

}  // namespace

void stream_copy(std::byte* to, const std::byte* from, size_t bytes) {
    const size_t misfit = reinterpret_cast<uintptr_t>(to) % kLineBytes;
    const size_t head = std::min(misfit ? kLineBytes - misfit : 0, bytes);
    std::memcpy(to, from, head);
    const size_t lines = (bytes - head) / kLineBytes, middle = lines * kLineBytes;
    stream_lines(to + head, from + head, lines);
    _mm_sfence();  // non-temporal stores are not ordered by a release
    std::memcpy(to + head + middle, from + head + middle, bytes - head - middle);
}

void fetch_copy(std::byte* to, const std::byte* from, size_t bytes, size_t more) {
    constexpr size_t kBlock = kPages * kPageBytes;
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

#else

void stream_copy(std::byte* to, const std::byte* from, size_t bytes) {
    std::memcpy(to, from, bytes);
}

void fetch_copy(std::byte* to, const std::byte* from, size_t bytes, size_t) {
    std::memcpy(to, from, bytes);
}

#endif

}  // namespace dure
