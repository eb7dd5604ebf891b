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

bool exceeds_cache(size_t bytes) {
    static const long known = sysconf(_SC_LEVEL3_CACHE_SIZE);
    constexpr size_t kGuess = 32 * 1024 * 1024;
    return bytes > (known > 0 ? static_cast<size_t>(known) : kGuess);
}

#if defined(DURE_STREAMS)

namespace {

constexpr size_t kLineBytes = 64;
constexpr size_t kAhead = 1024;  // bytes read ahead; the hardware stops at the end of a page

// Whole lines to an aligned place.
__attribute__((target("avx512f"))) void stream_lines_avx512(std::byte* to, const std::byte* from,
                                                            size_t lines) {
    for (size_t i = 0; i < lines; i++, to += kLineBytes, from += kLineBytes) {
        _mm_prefetch(reinterpret_cast<const char*>(from + kAhead), _MM_HINT_T0);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
    }
}

void stream_lines_sse2(std::byte* to, const std::byte* from, size_t lines) {
    for (size_t i = 0; i < lines; i++, to += kLineBytes, from += kLineBytes) {
        _mm_prefetch(reinterpret_cast<const char*>(from + kAhead), _MM_HINT_T0);
        const auto* in = reinterpret_cast<const __m128i*>(from);
        auto* out = reinterpret_cast<__m128i*>(to);
        for (int k = 0; k < 4; k++) _mm_stream_si128(out + k, _mm_loadu_si128(in + k));
    }
}

const auto stream_lines =
    __builtin_cpu_supports("avx512f") ? stream_lines_avx512 : stream_lines_sse2;

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

#else

void stream_copy(std::byte* to, const std::byte* from, size_t bytes) {
    std::memcpy(to, from, bytes);
}

#endif

}  // namespace dure
