// Kernels: all instruction sets agree bit for bit, NaNs aside, and with a plain loop.
#include <cmath>
#include <cstring>
#include <random>

#include "harness.h"
#include "kernels.h"

namespace dure {
namespace {

constexpr size_t kCount = 2500;  // more than two blocks, and no multiple of a vector
constexpr const char* kIsas[] = {"generic", "avx2", "avx512"};

std::vector<std::byte> noise(size_t bytes, unsigned seed, DType dtype) {
    std::mt19937 random(seed);
    std::vector<std::byte> out(bytes);
    for (std::byte& b : out) b = static_cast<std::byte>(random());
    if (dtype == DType::boolean) {
        for (std::byte& b : out) b &= std::byte{1};
    }
    return out;
}

std::vector<std::byte> reduced(DType dtype, Reduction reduction, int n) {
    const size_t bytes = kCount * item_bytes(dtype);
    std::vector<std::vector<std::byte>> sources;
    std::vector<const void*> from;
    for (int r = 0; r < n; r++) {
        sources.push_back(noise(bytes, static_cast<unsigned>(r), dtype));
    }
    for (auto& s : sources) from.push_back(s.data());
    std::vector<std::byte> out(bytes);
    void* to[1] = {out.data()};
    reduce_kernel(dtype, reduction)({to, 1, from.data(), n, kCount});
    return out;
}

bool is_nan(DType dtype, const std::byte* at) {
    if (dtype == DType::f64) {
        double x;
        std::memcpy(&x, at, 8);
        return std::isnan(x);
    }
    // The others that have more than one NaN, by the bits of the first beyond infinity, or, without
    // infinity, of the only one.
    uint32_t bits = 0;
    std::memcpy(&bits, at, item_bytes(dtype));
    switch (dtype) {
        case DType::f32:
            return (bits & 0x7fffffff) > 0x7f800000;
        case DType::bf16:
            return (bits & 0x7fff) > 0x7f80;
        case DType::f16:
            return (bits & 0x7fff) > 0x7c00;
        case DType::e5m2:
            return (bits & 0x7f) > 0x7c;
        case DType::e4m3fn:
            return (bits & 0x7f) == 0x7f;
        default:
            return false;
    }
}

DType component(DType dtype) {
    switch (dtype) {
        case DType::c32:
            return DType::f16;
        case DType::c64:
            return DType::f32;
        case DType::c128:
            return DType::f64;
        default:
            return dtype;
    }
}

// Equal, but for the payload and the sign of NaNs: where two NaNs meet, the processor hands on the
// first operand's, and the compiler may swap the operands of a sum or a product.
bool same(DType dtype, const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
    const DType of = component(dtype);
    const size_t item = item_bytes(of);
    for (size_t i = 0; i < a.size(); i += item) {
        if (std::memcmp(&a[i], &b[i], item) == 0) continue;
        if (!is_nan(of, &a[i]) || !is_nan(of, &b[i])) return false;
    }
    return true;
}

TEST(every_instruction_set_gives_the_same_bits) {
    const std::string best = kernel_isa();
    for (int d = 0; d < kReducibleDTypes; d++) {
        for (int k = 0; k < kReductions; k++) {
            const auto dtype = static_cast<DType>(d);
            const auto reduction = static_cast<Reduction>(k);
            CHECK(select_kernel_isa("generic"));
            if (!reduce_kernel(dtype, reduction)) continue;
            for (int n : {1, 2, 3, 5}) {
                CHECK(select_kernel_isa("generic"));
                const auto expected = reduced(dtype, reduction, n);
                for (const char* isa : kIsas) {
                    if (!select_kernel_isa(isa)) continue;
                    CHECK(same(dtype, expected, reduced(dtype, reduction, n)));
                }
            }
        }
    }
    CHECK(select_kernel_isa(best.c_str()));
}

TEST(sums_are_taken_in_the_order_of_ranks) {
    const float a = 1e8f, b = 1.0f, c = -1e8f;
    const void* from[3] = {&a, &b, &c};
    float out = -1;
    void* to[1] = {&out};
    reduce_kernel(DType::f32, Reduction::sum)({to, 1, from, 3, 1});
    CHECK(out == (a + b) + c);
}

TEST(half_precision_rounds_once) {
    // 2048 + 1 + 1 is 2050 if accumulated in float, 2048 if rounded after each step.
    const uint16_t a = 0x6800, one = 0x3c00;
    const void* from[3] = {&a, &one, &one};
    uint16_t out = 0;
    void* to[1] = {&out};
    reduce_kernel(DType::f16, Reduction::sum)({to, 1, from, 3, 1});
    CHECK(out == 0x6801);
}

TEST(low_precision_is_summed_into_float32_without_rounding) {
    // bf16: 256 + 1 is 256 (8 bits of mantissa); the float32 result keeps the 1.
    const uint16_t big = 0x4380, one = 0x3f80;
    const void* from[2] = {&big, &one};
    float out = 0;
    void* to[1] = {&out};
    reduce_kernel(DType::bf16, DType::f32, Reduction::sum)({to, 1, from, 2, 1});
    CHECK(out == 257.0f);
    reduce_kernel(DType::bf16, DType::f32, Reduction::avg)({to, 1, from, 2, 1});
    CHECK(out == 128.5f);
    // f16: 2048 + 1.
    const uint16_t half_big = 0x6800, half_one = 0x3c00;
    const void* halves[2] = {&half_big, &half_one};
    reduce_kernel(DType::f16, DType::f32, Reduction::sum)({to, 1, halves, 2, 1});
    CHECK(out == 2049.0f);
}

TEST(float32_is_rounded_once_into_low_precision) {
    // 256 + 1 + 1 is 258, which bf16 has; rounded after each step it would stay 256.
    const float big = 256, one = 1;
    const void* from[3] = {&big, &one, &one};
    uint16_t out = 0;
    void* to[1] = {&out};
    reduce_kernel(DType::f32, DType::bf16, Reduction::sum)({to, 1, from, 3, 1});
    CHECK(out == 0x4381);
    reduce_kernel(DType::f32, DType::f16, Reduction::sum)({to, 1, from, 3, 1});
    CHECK(out == 0x5c08);
}

TEST(a_premultiplied_sum_takes_each_source_times_its_factor) {
    const std::vector<float> a(3000, 3.0f), b(3000, 5.0f), c(3000, 7.0f);
    const void* from[3] = {a.data(), b.data(), c.data()};
    std::vector<float> out(3000), second(3000);
    void* to[2] = {out.data(), second.data()};
    const double factors[3] = {0.5, 2.0, -1.0};
    reduce_kernel(DType::f32, Reduction::premul_sum)({to, 2, from, 3, 3000, factors});
    for (size_t i = 0; i < 3000; i++) CHECK(out[i] == 4.5f && second[i] == 4.5f);
    // The product is as wide as the sum: 257 is none of bf16's numbers, 257 / 2 + 0.5 is.
    const uint16_t big = 0x4380, one = 0x3f80;
    const void* low[2] = {&big, &one};
    const double halves[2] = {0.5, 0.5};
    float sum = 0;
    void* into[1] = {&sum};
    reduce_kernel(DType::bf16, DType::f32, Reduction::premul_sum)({into, 1, low, 2, 1, halves});
    CHECK(sum == 128.5f);
}

TEST(integers_wrap) {
    const int8_t a = 127, b = 1;
    const void* from[2] = {&a, &b};
    int8_t out = 0;
    void* to[1] = {&out};
    reduce_kernel(DType::i8, Reduction::sum)({to, 1, from, 2, 1});
    CHECK(out == -128);
}

TEST(minimum_and_maximum_hand_on_nan) {
    const float nan = std::nanf(""), one = 1;
    for (Reduction reduction : {Reduction::min, Reduction::max}) {
        for (bool first : {true, false}) {
            const void* from[2] = {first ? &nan : &one, first ? &one : &nan};
            float out = 0;
            void* to[1] = {&out};
            reduce_kernel(DType::f32, reduction)({to, 1, from, 2, 1});
            CHECK(std::isnan(out));
        }
    }
}

TEST(undefined_pairs_have_no_kernel) {
    CHECK(reduce_kernel(DType::f32, Reduction::bxor) == nullptr);
    CHECK(reduce_kernel(DType::c64, Reduction::max) == nullptr);
    CHECK(reduce_kernel(DType::boolean, Reduction::avg) == nullptr);
    CHECK(reduce_kernel(DType::opaque, Reduction::sum) == nullptr);
    CHECK(reduce_kernel(DType::i32, Reduction::premul_sum) == nullptr);
    CHECK(reduce_kernel(DType::bf16, DType::f16, Reduction::sum) == nullptr);
    CHECK(reduce_kernel(DType::bf16, DType::f32, Reduction::max) == nullptr);
}

}  // namespace
}  // namespace dure
