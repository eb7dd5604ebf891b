// Reduction kernels: one source, compiled once per instruction set (see CMakeLists.txt).
//
// A range is reduced in blocks that stay in the first-level cache: the sources are widened into an
// accumulator, one after the other in the order of the ranks, and the result is rounded once,
// written to the first place and copied to the others. So an element's value depends on the sources
// alone, never on how a tensor was cut into ranges, and on no rank's place in time.
//
// Widened means: 16 and 8 bit floats accumulate in float, complex32 in complex64, everything else
// in itself; integers as unsigned, which wraps around without undefined behaviour. Contraction to
// fused multiply-add is off, so that all instruction sets give the same bits of every number.
// (Which NaN comes of two is left open: the processor takes the first operand's sign and payload,
// and which operand of a sum comes first is the compiler's choice, another one with other flags.)
//
// What an element is and how two are combined: elements.h. As there, nothing here may be an inline
// function shared with other objects.
#include "kernels.h"

#include <type_traits>

#include "elements.h"

#ifndef DURE_ISA
#define DURE_ISA generic
#endif

namespace dure {
namespace {

constexpr size_t kBlock = 1024;  // elements; 4 KiB of float

// ---- the loop -----------------------------------------------------------------------------------

// Formats that convert many numbers at a time do so into a block of their own.
template <typename E>
constexpr bool kConvertsMany = false;
#if defined(__F16C__)
template <>
constexpr bool kConvertsMany<Small<Float16>> = true;
#endif

template <typename E>
inline void widen(const typename E::Stored* in, typename E::Acc* out, size_t n) {
    if constexpr (kConvertsMany<E>) {
        E::Stored::load_many(in, out, n);
    } else {
        for (size_t i = 0; i < n; i++) out[i] = E::load(in[i]);
    }
}

// The three loops: two sources into the accumulator, one more source into it, and the rounded
// result out of it. The result may lie where a source lay, element for element, which the compiler
// need not fear (ivdep).

template <typename E, typename R>
inline void fold(typename E::Acc* acc, const typename E::Stored* in, size_t n) {
    if constexpr (kConvertsMany<E>) {
        alignas(64) typename E::Acc wide[kBlock];
        widen<E>(in, wide, n);
        for (size_t i = 0; i < n; i++) acc[i] = R::combine(acc[i], wide[i]);
    } else {
        for (size_t i = 0; i < n; i++) acc[i] = R::combine(acc[i], E::load(in[i]));
    }
}

template <typename E, typename R>
inline void first_two(typename E::Acc* acc, const typename E::Stored* a,
                      const typename E::Stored* b, size_t n) {
    if constexpr (kConvertsMany<E>) {
        widen<E>(a, acc, n);
        fold<E, R>(acc, b, n);
    } else {
        for (size_t i = 0; i < n; i++) acc[i] = R::combine(E::load(a[i]), E::load(b[i]));
    }
}

template <typename E, typename R>
inline void narrow(typename E::Acc* acc, typename E::Stored* out, size_t n, int ranks) {
    if constexpr (kConvertsMany<E>) {
        for (size_t i = 0; i < n; i++) acc[i] = R::finish(acc[i], ranks);
        E::Stored::store_many(acc, out, n);
    } else {
        for (size_t i = 0; i < n; i++) out[i] = E::store(R::finish(acc[i], ranks));
    }
}

// Formats that are the upper half of a wider one go two at a time: each is widened where it lies,
// by a shift or a mask, so that no lanes of a vector change places.
template <typename E>
constexpr bool kGoesInPairs = false;
template <>
constexpr bool kGoesInPairs<Small<BFloat16>> = true;

template <typename E, typename R>
inline void only_two_pairs(const typename E::Stored* a, const typename E::Stored* b,
                           typename E::Stored* out, size_t pairs) {
#pragma GCC ivdep
    for (size_t i = 0; i < pairs; i++) {
        uint32_t x, y;
        __builtin_memcpy(&x, a + 2 * i, 4);
        __builtin_memcpy(&y, b + 2 * i, 4);
        const float low = R::finish(R::combine(as_float(x << 16), as_float(y << 16)), 2);
        const float high =
            R::finish(R::combine(as_float(x & 0xffff0000u), as_float(y & 0xffff0000u)), 2);
        const uint32_t z = BFloat16::upper(low) >> 16 | (BFloat16::upper(high) & 0xffff0000u);
        __builtin_memcpy(out + 2 * i, &z, 4);
    }
}

// As `first_two` and `narrow`, without the accumulator's way through memory.
template <typename E, typename R>
inline void only_two(const typename E::Stored* a, const typename E::Stored* b,
                     typename E::Stored* out, size_t n) {
    if constexpr (kGoesInPairs<E>) {
        const size_t pairs = n / 2;
        only_two_pairs<E, R>(a, b, out, pairs);
        a += 2 * pairs, b += 2 * pairs, out += 2 * pairs, n -= 2 * pairs;
    }
#pragma GCC ivdep
    for (size_t i = 0; i < n; i++) {
        out[i] = E::store(R::finish(R::combine(E::load(a[i]), E::load(b[i])), 2));
    }
}

// Both results at once, so that a line that comes from another core's cache is read and written in
// one go. (The compiler makes vectors of this only where nothing is converted.)
template <typename E>
constexpr bool kWritesBoth = false;
template <typename T>
constexpr bool kWritesBoth<Native<T>> = true;

template <typename T, typename R>
void two_to_two(const Operands& o) {
    const auto *a = static_cast<const T*>(o.sources[0]), *b = static_cast<const T*>(o.sources[1]);
    auto *out = static_cast<T*>(o.outs[0]), *other = static_cast<T*>(o.outs[1]);
    const size_t count = o.count;  // a byte that is written could be part of `o`
#pragma GCC ivdep
    for (size_t i = 0; i < count; i++) {
        const T x = R::finish(R::combine(a[i], b[i]), 2);
        out[i] = x;
        other[i] = x;
    }
}

template <typename E, typename R>
void reduce(const Operands& o) {
    using Stored = typename E::Stored;
    if constexpr (kWritesBoth<E>) {
        if (o.n == 2 && o.num_outs == 2) return two_to_two<Stored, R>(o);
    }
    alignas(64) typename E::Acc acc[kBlock];
    for (size_t at = 0; at < o.count; at += kBlock) {
        const size_t n = o.count - at < kBlock ? o.count - at : kBlock;
        auto source = [&](int r) { return static_cast<const Stored*>(o.sources[r]) + at; };
        Stored* out = static_cast<Stored*>(o.outs[0]) + at;
        if (o.n == 2 && !kConvertsMany<E>) {
            only_two<E, R>(source(0), source(1), out, n);
        } else {
            if (o.n == 1) {
                widen<E>(source(0), acc, n);
            } else {
                first_two<E, R>(acc, source(0), source(1), n);
            }
            for (int r = 2; r < o.n; r++) fold<E, R>(acc, source(r), n);
            narrow<E, R>(acc, out, n, o.n);
        }
        for (int k = 1; k < o.num_outs; k++) {
            __builtin_memcpy(static_cast<Stored*>(o.outs[k]) + at, out, n * sizeof(Stored));
        }
    }
}

// Element by element times a real number.
template <typename T>
inline T times(T x, double factor) {
    return x * static_cast<T>(factor);
}
template <typename T>
inline Pair<T> times(Pair<T> x, double factor) {
    return {x.re * static_cast<T>(factor), x.im * static_cast<T>(factor)};
}

// Sources of one format, results of another that accumulates alike. `R` is a sum or an average;
// with factors the sum is premultiplied: each source's product is rounded as the accumulator is.
template <typename E, typename O, typename R>
void reduce_into(const Operands& o) {
    static_assert(std::is_same_v<typename E::Acc, typename O::Acc>);
    using Acc = typename E::Acc;
    alignas(64) Acc acc[kBlock];
    alignas(64) Acc wide[kBlock];
    for (size_t at = 0; at < o.count; at += kBlock) {
        const size_t n = o.count - at < kBlock ? o.count - at : kBlock;
        for (int r = 0; r < o.n; r++) {
            Acc* to = r == 0 ? acc : wide;
            widen<E>(static_cast<const typename E::Stored*>(o.sources[r]) + at, to, n);
            if (o.factors != nullptr) {
                const double factor = o.factors[r];
                for (size_t i = 0; i < n; i++) to[i] = times(to[i], factor);
            }
            if (r == 0) continue;
            for (size_t i = 0; i < n; i++) acc[i] = R::combine(acc[i], wide[i]);
        }
        typename O::Stored* out = static_cast<typename O::Stored*>(o.outs[0]) + at;
        narrow<O, R>(acc, out, n, o.n);
        for (int k = 1; k < o.num_outs; k++) {
            __builtin_memcpy(static_cast<typename O::Stored*>(o.outs[k]) + at, out,
                             n * sizeof(typename O::Stored));
        }
    }
}

template <typename E, typename O>
ReduceFn converting(Reduction reduction) {
    switch (reduction) {
        case Reduction::sum:
        case Reduction::premul_sum:
            return reduce_into<E, O, Sum>;
        case Reduction::avg:
            return reduce_into<E, O, Average>;
        default:
            return nullptr;
    }
}

template <typename E>
ReduceFn arithmetic(Reduction reduction) {
    switch (reduction) {
        case Reduction::sum:
            return reduce<E, Sum>;
        case Reduction::product:
            return reduce<E, Product>;
        default:
            return nullptr;
    }
}

template <typename E>
ReduceFn floating(Reduction reduction) {
    switch (reduction) {
        case Reduction::avg:
            return reduce<E, Average>;
        case Reduction::min:
            return reduce<E, Minimum>;
        case Reduction::max:
            return reduce<E, Maximum>;
        case Reduction::premul_sum:
            return reduce_into<E, E, Sum>;
        default:
            return arithmetic<E>(reduction);
    }
}

template <typename E>
ReduceFn complex_valued(Reduction reduction) {
    switch (reduction) {
        case Reduction::avg:
            return reduce<E, Average>;
        case Reduction::premul_sum:
            return reduce_into<E, E, Sum>;
        default:
            return arithmetic<E>(reduction);
    }
}

// Sums, products and bits do not care for signs; comparisons and quotients do.
template <typename Signed, typename Unsigned>
ReduceFn integral(Reduction reduction) {
    switch (reduction) {
        case Reduction::avg:
            return reduce<Native<Unsigned>, IntegerAverage<Signed>>;
        case Reduction::min:
            return reduce<Native<Signed>, Minimum>;
        case Reduction::max:
            return reduce<Native<Signed>, Maximum>;
        case Reduction::band:
            return reduce<Native<Unsigned>, And>;
        case Reduction::bor:
            return reduce<Native<Unsigned>, Or>;
        case Reduction::bxor:
            return reduce<Native<Unsigned>, Xor>;
        default:
            return arithmetic<Native<Unsigned>>(reduction);
    }
}

ReduceFn logical(Reduction reduction) {
    switch (reduction) {
        case Reduction::sum:
        case Reduction::max:
        case Reduction::bor:
            return reduce<Bool, Or>;
        case Reduction::product:
        case Reduction::min:
        case Reduction::band:
            return reduce<Bool, And>;
        case Reduction::bxor:
            return reduce<Bool, Xor>;
        default:
            return nullptr;
    }
}

}  // namespace

namespace DURE_ISA {

ReduceFn find(DType from, DType into, Reduction reduction) {
    if (from != into) {
        if (from == DType::bf16 && into == DType::f32)
            return converting<Small<BFloat16>, Native<float>>(reduction);
        if (from == DType::f16 && into == DType::f32)
            return converting<Small<Float16>, Native<float>>(reduction);
        if (from == DType::f32 && into == DType::bf16)
            return converting<Native<float>, Small<BFloat16>>(reduction);
        if (from == DType::f32 && into == DType::f16)
            return converting<Native<float>, Small<Float16>>(reduction);
        return nullptr;
    }
    switch (from) {
        case DType::f64:
            return floating<Native<double>>(reduction);
        case DType::f32:
            return floating<Native<float>>(reduction);
        case DType::f16:
            return floating<Small<Float16>>(reduction);
        case DType::bf16:
            return floating<Small<BFloat16>>(reduction);
        case DType::e4m3fn:
            return floating<Small<E4M3fn>>(reduction);
        case DType::e5m2:
            return floating<Small<E5M2>>(reduction);
        case DType::e4m3fnuz:
            return floating<Small<E4M3fnuz>>(reduction);
        case DType::e5m2fnuz:
            return floating<Small<E5M2fnuz>>(reduction);
        case DType::e8m0fnu:
            return floating<Small<E8M0fnu>>(reduction);
        case DType::i8:
            return integral<int8_t, uint8_t>(reduction);
        case DType::i16:
            return integral<int16_t, uint16_t>(reduction);
        case DType::i32:
            return integral<int32_t, uint32_t>(reduction);
        case DType::i64:
            return integral<int64_t, uint64_t>(reduction);
        case DType::u8:
            return integral<uint8_t, uint8_t>(reduction);
        case DType::u16:
            return integral<uint16_t, uint16_t>(reduction);
        case DType::u32:
            return integral<uint32_t, uint32_t>(reduction);
        case DType::u64:
            return integral<uint64_t, uint64_t>(reduction);
        case DType::boolean:
            return logical(reduction);
        case DType::c32:
            return complex_valued<ComplexHalf>(reduction);
        case DType::c64:
            return complex_valued<Complex<float>>(reduction);
        case DType::c128:
            return complex_valued<Complex<double>>(reduction);
        default:
            return nullptr;
    }
}

}  // namespace DURE_ISA
}  // namespace dure
