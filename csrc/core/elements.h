// What the kernels reduce: element types, by how they are loaded, accumulated and stored; and the
// reductions, by how they combine two accumulated values.
//
// Compiled once per instruction set: as in floats.h, everything lives in an anonymous namespace.
#pragma once

#include "floats.h"

namespace dure {
namespace {

// ---- element types: how to load, combine and store
// -----------------------------------------------

template <typename T>
struct Native {
    using Stored = T;
    using Acc = T;
    static Acc load(T x) { return x; }
    static T store(Acc x) { return x; }
};

template <typename F>
struct Small {
    using Stored = F;
    using Acc = float;
    static Acc load(F x) { return F::load(x); }
    static F store(Acc x) { return F::store(x); }
};

struct Bool {
    using Stored = uint8_t;
    using Acc = uint8_t;
    static Acc load(uint8_t x) { return x != 0; }
    static uint8_t store(Acc x) { return x; }
};

template <typename T>
struct Pair {
    T re, im;
};

template <typename T>
struct Complex {
    using Stored = Pair<T>;
    using Acc = Pair<T>;
    static Acc load(Stored x) { return x; }
    static Stored store(Acc x) { return x; }
};

struct ComplexHalf {
    using Stored = Pair<Float16>;
    using Acc = Pair<float>;
    static Acc load(Stored x) { return {Float16::load(x.re), Float16::load(x.im)}; }
    static Stored store(Acc x) { return {Float16::store(x.re), Float16::store(x.im)}; }
};

// ---- reductions ---------------------------------------------------------------------------------

// A reduction whose result is what combining left.
struct AsCombined {
    template <typename T>
    static T finish(T x, int) {
        return x;
    }
};

struct Sum : AsCombined {
    template <typename T>
    static T combine(T a, T b) {
        return static_cast<T>(a + b);
    }
    template <typename T>
    static Pair<T> combine(Pair<T> a, Pair<T> b) {
        return {a.re + b.re, a.im + b.im};
    }
};

struct Average : Sum {
    template <typename T>
    static T finish(T x, int n) {
        return x / static_cast<T>(n);
    }
    template <typename T>
    static Pair<T> finish(Pair<T> x, int n) {
        return {x.re / static_cast<T>(n), x.im / static_cast<T>(n)};
    }
};

// An average of integers, which are summed as unsigned ones:
// the quotient is truncated towards zero.
template <typename Integer>
struct IntegerAverage : Sum {
    template <typename T>
    static T finish(T x, int n) {
        using Wide = decltype(Integer{} + Integer{});  // holds any number of ranks
        return static_cast<T>(static_cast<Wide>(static_cast<Integer>(x)) / static_cast<Wide>(n));
    }
};

// Keeps the compiler from fusing the multiplication that made `x` with what follows: GCC 12 does so
// when it vectorises a complex product, even with -ffp-contract=off.
template <typename T>
inline T rounded(T x) {
#if defined(__x86_64__)
    asm("" : "+x"(x));
#elif defined(__aarch64__)
    asm("" : "+w"(x));
#endif
    return x;
}

struct Product : AsCombined {
    static float combine(float a, float b) { return a * b; }
    static double combine(double a, double b) { return a * b; }
    static uint64_t combine(uint64_t a, uint64_t b) { return a * b; }
    static uint32_t combine(uint32_t a, uint32_t b) { return a * b; }
    static uint16_t combine(uint16_t a, uint16_t b) {
        return static_cast<uint16_t>(uint32_t{a} * uint32_t{b});
    }
    static uint8_t combine(uint8_t a, uint8_t b) {
        return static_cast<uint8_t>(uint32_t{a} * uint32_t{b});
    }
    template <typename T>
    static Pair<T> combine(Pair<T> a, Pair<T> b) {
        return {rounded(a.re * b.re) - rounded(a.im * b.im),
                rounded(a.re * b.im) + rounded(a.im * b.re)};
    }
};

// A NaN on either side wins: b's by the second test, a's because no comparison with it holds.
struct Minimum : AsCombined {
    template <typename T>
    static T combine(T a, T b) {
        return (b < a || b != b) ? b : a;
    }
};

struct Maximum : AsCombined {
    template <typename T>
    static T combine(T a, T b) {
        return (b > a || b != b) ? b : a;
    }
};

struct And : AsCombined {
    template <typename T>
    static T combine(T a, T b) {
        return static_cast<T>(a & b);
    }
};

struct Or : AsCombined {
    template <typename T>
    static T combine(T a, T b) {
        return static_cast<T>(a | b);
    }
};

struct Xor : AsCombined {
    template <typename T>
    static T combine(T a, T b) {
        return static_cast<T>(a ^ b);
    }
};

}  // namespace
}  // namespace dure
