// Small floats: every format as "to float" and "from float, nearest even".
//
// The conversions agree bit for bit with torch's for every number (tests/native compares all
// of them); only the payload and the sign of a NaN are open. This file is compiled once per
// instruction set, so everything in it lives in an anonymous namespace and uses no inline function
// of the standard library: the linker keeps one copy of such a function, and it might be the
// AVX-512 one.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace dure {
namespace {

inline float as_float(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

inline uint32_t as_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

// The float32 that the magnitude `rest` of a small format is: its exponent, of bias `Bias`, is
// raised by an addition of integers. A subnormal number becomes 1.rest times the smallest normal
// one, of which that is taken away again. No operand and no result is subnormal as float32: a
// processor that takes such numbers as zero (torch.set_flush_denormal) keeps these.
template <int M, int Bias>
inline uint32_t rebased(uint32_t rest) {
    constexpr uint32_t kSmallest = uint32_t{128 - Bias} << 23;  // 2^(1 - Bias)
    uint32_t normal = (rest << (23 - M)) + (uint32_t{127 - Bias} << 23);
    uint32_t subnormal = as_bits(as_float((rest << (23 - M)) + kSmallest) - as_float(kSmallest));
    return rest >> M ? normal : subnormal;
}

struct BFloat16 {
    uint16_t bits;
    using Accumulator = float;
    static float load(BFloat16 x) { return as_float(uint32_t{x.bits} << 16); }
    // The rounded value in the upper half of the bits; what is below is rubbish.
    static uint32_t upper(float x) {
        uint32_t b = as_bits(x);
        return x != x ? 0x7fc00000u : b + 0x7fff + ((b >> 16) & 1);
    }
    static BFloat16 store(float x) { return {static_cast<uint16_t>(upper(x) >> 16)}; }
};

struct Float16 {
    uint16_t bits;
    using Accumulator = float;
#if defined(__F16C__)
    static float load(Float16 x) { return _cvtsh_ss(x.bits); }
    static Float16 store(float x) { return {static_cast<uint16_t>(_cvtss_sh(x, 0))}; }
    // The compiler does not find these instructions by itself.
    static void load_many(const Float16* in, float* out, size_t n) {
        size_t i = 0;
#if defined(__AVX512F__)
        for (; i + 16 <= n; i += 16) {
            __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i));
            _mm512_storeu_ps(out + i, _mm512_cvtph_ps(half));
        }
#endif
        for (; i + 8 <= n; i += 8) {
            __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i));
            _mm256_storeu_ps(out + i, _mm256_cvtph_ps(half));
        }
        for (; i < n; i++) out[i] = load(in[i]);
    }
    static void store_many(const float* in, Float16* out, size_t n) {
        size_t i = 0;
#if defined(__AVX512F__)
        for (; i + 16 <= n; i += 16) {
            __m256i half = _mm512_cvtps_ph(_mm512_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), half);
        }
#endif
        for (; i + 8 <= n; i += 8) {
            __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), 0);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), half);
        }
        for (; i < n; i++) out[i] = store(in[i]);
    }
#else
    static float load(Float16 x) {
        uint32_t sign = uint32_t{x.bits & 0x8000u} << 16, rest = x.bits & 0x7fffu;
        uint32_t bits = rest >= 0x7c00u ? 0x7f800000u | (rest << 13) : rebased<10, 15>(rest);
        return as_float(sign | bits);
    }
    static Float16 store(float x) {
        uint32_t b = as_bits(x), sign = b >> 16 & 0x8000u, rest = b & 0x7fffffffu;
        uint32_t out;
        if (rest > 0x7f800000u) {
            out = 0x7e00u;
        } else if (rest >= 0x477ff000u) {  // 65520 and above round to infinity
            out = 0x7c00u;
        } else if (rest < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the rounded mantissa
            out = as_bits(as_float(rest) + 0.5f) - 0x3f000000u;
        } else {
            out = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1)) >> 13;
        }
        return {static_cast<uint16_t>(sign | out)};
    }
#endif
};

// An 8 bit float with a sign, `M` bits of mantissa and an exponent bias.
// `kIeee`: has infinities (e5m2). `kFnuz`: no infinity, no -0, NaN is 0x80. Otherwise ("fn"): no
// infinity, NaN is all ones.
enum class Flavor { ieee, fn, fnuz };

template <int M, int Bias, Flavor F>
struct Float8 {
    uint8_t bits;
    using Accumulator = float;
    static constexpr uint32_t kNan = F == Flavor::fnuz ? 0x80 : 0x7f;
    static constexpr uint32_t kInf = 0x7c;  // of the ieee flavor
    // The largest finite code, and what is beyond it: torch lets only "fn" saturate.
    static constexpr uint32_t kMax = F == Flavor::ieee ? 0x7b : F == Flavor::fn ? 0x7e : 0x7f;

    static constexpr uint32_t kOverflow = F == Flavor::ieee ? kInf : F == Flavor::fn ? kMax : kNan;

    static float load(Float8 x) {
        uint32_t sign = uint32_t{x.bits & 0x80u} << 24, rest = x.bits & 0x7fu;
        if constexpr (F == Flavor::fnuz) {
            if (x.bits == 0x80) return as_float(0x7fc00000u);
        } else {
            if (rest > kMax) {
                bool infinite = F == Flavor::ieee && rest == kInf;
                return as_float(sign | (infinite ? 0x7f800000u : 0x7fc00000u));
            }
        }
        return as_float(sign | rebased<M, Bias>(rest));
    }

    static Float8 store(float x) {
        constexpr uint32_t kShift = 23 - M;
        constexpr uint32_t kMinNormal = uint32_t{128 - Bias} << 23;  // 2^(1 - Bias)
        uint32_t b = as_bits(x), sign = b >> 24 & 0x80u, rest = b & 0x7fffffffu;
        uint32_t out;
        if (rest > 0x7f800000u) {
            out = kNan;
        } else if (rest < kMinNormal) {
            // Adding a power of two whose last mantissa bit is the format's smallest step.
            constexpr uint32_t kMagic = uint32_t{127 + 23 + 1 - Bias - M} << 23;
            out = as_bits(as_float(rest) + as_float(kMagic)) - kMagic;
        } else {
            out = (rest - (uint32_t{127 - Bias} << 23) + ((1u << (kShift - 1)) - 1) +
                   (rest >> kShift & 1)) >>
                  kShift;
            if (out > kMax) out = kOverflow;
        }
        if (F == Flavor::fnuz && (out == 0 || out == kNan)) sign = 0;  // no -0; NaN has one code
        if (F == Flavor::fnuz && out == kNan) return {0x80};
        return {static_cast<uint8_t>(sign | out)};
    }
};

using E4M3fn = Float8<3, 7, Flavor::fn>;
using E5M2 = Float8<2, 15, Flavor::ieee>;
using E4M3fnuz = Float8<3, 8, Flavor::fnuz>;
using E5M2fnuz = Float8<2, 16, Flavor::fnuz>;

// A power of two: no sign, no zero, 255 is NaN. As torch, a sign is dropped.
struct E8M0fnu {
    uint8_t bits;
    using Accumulator = float;
    static float load(E8M0fnu x) {
        if (x.bits == 0) return as_float(0x00400000u);
        if (x.bits == 255) return as_float(0x7fc00000u);
        return as_float(uint32_t{x.bits} << 23);
    }
    static E8M0fnu store(float x) {
        uint32_t b = as_bits(x), exponent = b >> 23 & 0xffu, fraction = b & 0x7fffffu;
        if (exponent == 255) return {255};
        // A tie goes to the even mantissa with its leading bit: up, unless that bit is absent.
        bool up = fraction > 0x400000u || (fraction == 0x400000u && exponent > 0);
        return {static_cast<uint8_t>(exponent + (up ? 1 : 0))};
    }
};

}  // namespace
}  // namespace dure
