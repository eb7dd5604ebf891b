// Every collective on 1 to 5 ranks, at the sizes where the way of doing it changes.
#include <algorithm>
#include <cstring>

#include "harness.h"

namespace dure {
namespace {

using namespace dure::testing;

std::vector<size_t> counts(int n) {
    const size_t chunk = kStageBytes / sizeof(int32_t), ranks = static_cast<size_t>(n);
    return {0,    1,    ranks - 1, ranks, ranks + 1, 8,     9,
            4096, 4097, chunk - 1, chunk, chunk + 1, 300007};
}

// Element by element the thread sanitizer would take most of the time. What ranks share is copied
// and compared whole, which it sees.
__attribute__((no_sanitize("thread"))) void fill(int32_t* to, size_t count, int from, int step) {
    for (size_t i = 0; i < count; i++) to[i] = from + static_cast<int32_t>(i) * step;
}

std::vector<int32_t> ramp(size_t count, int from, int step = 1) {
    std::vector<int32_t> made(count);
    fill(made.data(), count, from, step);
    return std::vector<int32_t>(made);
}

void on_all(const std::function<void(Group&, size_t)>& body) {
    for (int64_t threshold : {kNoSingleCopies, int64_t{16'384}}) {
        single_copies = threshold;
        for (int n : {1, 2, 3, 5}) {
            on_threads(n, [&](Group& g) {
                for (size_t count : counts(n)) body(g, count);
            });
        }
    }
}

TEST(all_reduce_sums) {
    on_all([](Group& g, size_t count) {
        const int n = g.size();
        auto x = ramp(count, g.rank());
        CHECK(g.all_reduce(block_of(x), DType::i32, Reduction::sum) == Status::ok);
        CHECK(x == ramp(count, n * (n - 1) / 2, n));
    });
}

// All ranks, or all but one, which reduces in place.
TEST(all_reduce_into_other_memory_leaves_what_was_given) {
    on_all([](Group& g, size_t count) {
        const int n = g.size();
        for (bool mixed : {false, true}) {
            const bool in_place = mixed && g.rank() == 0;
            const auto given = ramp(count, g.rank());
            auto x = given;
            std::vector<int32_t> result(in_place ? 0 : count, -1);
            auto& out = in_place ? x : result;
            Call call{Op::all_reduce, DType::i32, Reduction::sum, -1, {}, {block_of(out)}};
            if (!in_place) call.inputs = {block_of(x)};
            CHECK(g.run(call) == Status::ok);
            CHECK(in_place || x == given);
            CHECK(out == ramp(count, n * (n - 1) / 2, n));
        }
    });
}

TEST(reduce_changes_only_the_root) {
    on_all([](Group& g, size_t count) {
        const int n = g.size(), root = n - 1;
        auto x = ramp(count, g.rank());
        const auto before = x;
        CHECK(g.run({Op::reduce, DType::i32, Reduction::sum, root, {}, {block_of(x)}}) ==
              Status::ok);
        if (g.rank() != root) CHECK(x == before);
        if (g.rank() == root) CHECK(x == ramp(count, n * (n - 1) / 2, n));
    });
}

TEST(broadcast_copies_from_every_root) {
    on_all([](Group& g, size_t count) {
        for (int root = 0; root < g.size(); root++) {
            auto x = ramp(count, g.rank() * 1000);
            Call call{Op::broadcast, DType::i32, Reduction::none, root, {}, {block_of(x)}};
            CHECK(g.run(call) == Status::ok);
            CHECK(x == ramp(count, root * 1000));
        }
    });
}

TEST(all_gather_takes_blocks_of_different_lengths) {
    on_all([](Group& g, size_t count) {
        std::vector<std::vector<int32_t>> out;
        Call call{Op::all_gather, DType::i32, Reduction::none, -1, {}, {}};
        for (int r = 0; r < g.size(); r++) out.emplace_back(count + static_cast<size_t>(r));
        for (auto& o : out) call.outputs.push_back(block_of(o));
        auto mine = ramp(count + static_cast<size_t>(g.rank()), g.rank());
        call.inputs = {block_of(mine)};
        CHECK(g.run(call) == Status::ok);
        for (int r = 0; r < g.size(); r++) {
            CHECK(out[static_cast<size_t>(r)] == ramp(count + static_cast<size_t>(r), r));
        }
    });
}

TEST(gather_and_scatter_are_inverse) {
    on_all([](Group& g, size_t count) {
        const int root = g.size() / 2;
        std::vector<std::vector<int32_t>> parts;
        Call call{Op::gather, DType::i32, Reduction::none, root, {}, {}};
        for (int r = 0; r < g.size(); r++) parts.emplace_back(count + static_cast<size_t>(2 * r));
        if (g.rank() == root) {
            for (auto& p : parts) call.outputs.push_back(block_of(p));
        }
        const size_t length = count + static_cast<size_t>(2 * g.rank());
        auto mine = ramp(length, g.rank());
        call.inputs = {block_of(mine)};
        CHECK(g.run(call) == Status::ok);
        std::vector<int32_t> back(length);
        Call inverse{Op::scatter, DType::i32,   Reduction::none,
                     root,        call.outputs, {block_of(back)}};
        CHECK(g.run(inverse) == Status::ok);
        CHECK(back == mine);
    });
}

TEST(all_to_all_takes_uneven_blocks) {
    on_all([](Group& g, size_t count) {
        const auto n = static_cast<size_t>(g.size()), me = static_cast<size_t>(g.rank());
        std::vector<std::vector<int32_t>> in, out;
        for (size_t r = 0; r < n; r++) {
            in.push_back(ramp(count + me + 2 * r, static_cast<int>(100 * me + r)));
            out.emplace_back(count + r + 2 * me);
        }
        Call call{Op::all_to_all, DType::i32, Reduction::none, -1, {}, {}};
        for (auto& b : in) call.inputs.push_back(block_of(b));
        for (auto& b : out) call.outputs.push_back(block_of(b));
        CHECK(g.run(call) == Status::ok);
        for (size_t r = 0; r < n; r++) {
            CHECK(out[r] == ramp(count + r + 2 * me, static_cast<int>(100 * r + me)));
        }
    });
}

// A tensor [rows, n, run]: the block of a rank is what the second dimension has for it.
struct Cut {
    size_t rows, ranks, block;  // elements of a block

    size_t run() const { return block / rows; }
    Runs runs() const { return {rows, ranks * run() * sizeof(int32_t)}; }
    std::vector<Block> blocks(int32_t* tensor) const {
        std::vector<Block> out;
        for (size_t r = 0; r < ranks; r++) {
            out.push_back({reinterpret_cast<std::byte*>(tensor + r * run()), block * 4});
        }
        return out;
    }
    // A tensor whose block of each rank `r` is first[r], first[r] + 1, ...
    std::vector<int32_t> tensor(const std::vector<int>& first) const {
        std::vector<int32_t> made(ranks * block);
        for (size_t row = 0; row < rows; row++) {
            for (size_t r = 0; r < ranks; r++) {
                fill(&made[(row * ranks + r) * run()], run(),
                     first[r] + static_cast<int>(row * run()), 1);
            }
        }
        return made;
    }
};

// What is given lies in the heap or, on all ranks or on one, elsewhere.
void exchange_runs(Group& g, size_t block, size_t given_rows, size_t taken_rows) {
    const auto n = static_cast<size_t>(g.size()), me = static_cast<size_t>(g.rank());
    const Cut given{given_rows, n, block}, taken{taken_rows, n, block};
    std::vector<int> to_others, from_others;
    for (size_t r = 0; r < n; r++) {
        to_others.push_back(static_cast<int>(me * 100'000'000 + r * 10'000'000));
        from_others.push_back(static_cast<int>(r * 100'000'000 + me * 10'000'000));
    }
    const auto shared = g.heap().allocate(n * block * 4, false);
    auto own = given.tensor(to_others);
    const auto expected = taken.tensor(from_others);
    std::memcpy(shared->data, own.data(), n * block * 4);
    for (size_t in_heap : {size_t{0}, n - 1, n}) {
        int32_t* in = me < in_heap ? reinterpret_cast<int32_t*>(shared->data) : own.data();
        std::vector<int32_t> out(n * block, -1);
        Call call{Op::all_to_all, DType::i32, Reduction::none, -1, {}, {}};
        call.inputs = given.blocks(in);
        call.outputs = taken.blocks(out.data());
        call.given = given.runs();
        call.taken = taken.runs();
        CHECK(g.run(call) == Status::ok);
        CHECK(out == expected);
    }
}

TEST(all_to_all_takes_blocks_in_runs) {
    for (int64_t threshold : {kNoSingleCopies, int64_t{16'384}}) {
        single_copies = threshold;
        for (int n : {1, 2, 3, 5}) {
            on_threads(n, [](Group& g) {
                for (size_t block : {1'200, 120'000, 2'400'000}) {
                    const bool streamed = block > 1'000'000;
                    if (streamed && g.size() != 2) continue;
                    for (size_t given : {1, 4, 1'200}) {
                        if (streamed && given != 4) continue;
                        for (size_t taken : {1, 6, 1'200}) exchange_runs(g, block, given, taken);
                    }
                }
            });
        }
    }
}

TEST(reduce_scatter_in_place) {
    on_all([](Group& g, size_t count) {
        const int n = g.size();
        const auto ranks = static_cast<size_t>(n), me = static_cast<size_t>(g.rank());
        auto x = ramp(count * ranks, g.rank());
        Call call{Op::reduce_scatter, DType::i32, Reduction::sum, -1, {}, {}};
        for (size_t r = 0; r < ranks; r++) {
            call.inputs.push_back({reinterpret_cast<std::byte*>(x.data() + r * count), count * 4});
        }
        call.outputs = {call.inputs[me]};
        CHECK(g.run(call) == Status::ok);
        const auto sum = ramp(count, static_cast<int>(me * count) * n + n * (n - 1) / 2, n);
        CHECK(count == 0 || std::memcmp(&x[me * count], sum.data(), count * 4) == 0);
    });
}

TEST(heap_tensors_are_reduced_in_place_and_mix_with_ordinary_ones) {
    for (int n : {1, 2, 3, 5}) {
        on_threads(n, [n](Group& g) {
            constexpr size_t kCount = 200'003;
            auto block = g.heap().allocate(kCount * 4, false);
            CHECK(block != nullptr);
            auto* shared = reinterpret_cast<int32_t*>(block->data);
            std::vector<int32_t> own(kCount);
            for (bool mixed : {false, true}) {
                int32_t* x = mixed && g.rank() == 0 ? own.data() : shared;
                const auto given = ramp(kCount, g.rank());
                std::memcpy(x, given.data(), kCount * 4);
                const Block tensor{reinterpret_cast<std::byte*>(x), kCount * 4};
                CHECK(g.all_reduce(tensor, DType::i32, Reduction::sum) == Status::ok);
                const auto sum = ramp(kCount, n * (n - 1) / 2, n);
                CHECK(std::memcmp(x, sum.data(), kCount * 4) == 0);
            }
        });
    }
}

TEST(small_calls_follow_each_other_without_mixing) {
    on_processes(3, [](Group& g) {
        for (int32_t k = 0; k < 20'000; k++) {
            std::vector<int32_t> x{k + g.rank()};
            CHECK(g.all_reduce(block_of(x), DType::i32, Reduction::sum) == Status::ok);
            CHECK(x[0] == 3 * k + 3);
        }
    });
}

TEST(attach_refuses_what_is_not_its_segment) {
    auto group = Group::create(options_of(0, 2), kNonce);
    bool refused = false;
    try {
        Group::attach(options_of(1, 2), getpid(), group->file(), kNonce + 1);
    } catch (const std::runtime_error&) {
        refused = true;
    }
    CHECK(refused);
}

}  // namespace
}  // namespace dure
