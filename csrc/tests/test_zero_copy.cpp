// Collectives on tensors of the symmetric heap, on ordinary ones, and on both at once: the same
// results.
#include "harness.h"

namespace dure {
namespace {

using namespace dure::testing;

constexpr size_t kCount = 30'011;           // of a block; no multiple of a line
constexpr size_t kLarge = 6 * 1024 * 1024;  // elements: more than most caches, so streamed

// Room for n blocks on every rank: in the heap, or of this rank alone.
struct Room {
    std::shared_ptr<HeapMemory> shared;
    std::vector<int32_t> own;
    int32_t* data;

    Room(Group& g, size_t count, bool in_heap) : own(in_heap ? 0 : count) {
        shared = g.heap().allocate(count * sizeof(int32_t), false);
        CHECK(shared != nullptr);
        data = in_heap ? reinterpret_cast<int32_t*>(shared->data) : own.data();
    }
    Block block(size_t i, size_t count) const {
        return {reinterpret_cast<std::byte*>(data + i * count), count * sizeof(int32_t)};
    }
    std::vector<Block> blocks(size_t n, size_t count) const {
        std::vector<Block> out;
        for (size_t i = 0; i < n; i++) out.push_back(block(i, count));
        return out;
    }
    void fill(size_t count, int32_t from) {
        for (size_t i = 0; i < count; i++) data[i] = from + static_cast<int32_t>(i);
    }
    void expect(size_t block, size_t count, int32_t from, int32_t factor = 1) const {
        for (size_t i = 0; i < count; i++) {
            CHECK(data[block * count + i] == factor * static_cast<int32_t>(i) + from);
        }
    }
};

// Where the tensors lie: all in the heap, or those of rank 0 elsewhere.
void on_all(const std::function<void(Group&, bool)>& body) {
    for (int n : {2, 3, 5}) {
        on_threads(n, [&](Group& g) {
            for (bool mixed : {false, true}) body(g, !(mixed && g.rank() == 0));
        });
    }
}

TEST(all_gather_and_gather_take_blocks_from_the_heap) {
    on_all([](Group& g, bool in_heap) {
        const auto n = static_cast<size_t>(g.size());
        Room in(g, kCount, in_heap), out(g, kCount * n, in_heap);
        in.fill(kCount, g.rank() * 1000);
        Call call{Op::all_gather, DType::i32, Reduction::none, -1, {}, {}};
        call.inputs = {in.block(0, kCount)};
        call.outputs = out.blocks(n, kCount);
        CHECK(g.run(call) == Status::ok);
        for (size_t r = 0; r < n; r++) out.expect(r, kCount, static_cast<int32_t>(r) * 1000);
        out.fill(kCount * n, 0);
        call.op = Op::gather;
        call.root = g.size() - 1;
        if (g.rank() != call.root) call.outputs.clear();
        CHECK(g.run(call) == Status::ok);
        for (size_t r = 0; r < n && g.rank() == call.root; r++) {
            out.expect(r, kCount, static_cast<int32_t>(r) * 1000);
        }
    });
}

TEST(reduce_scatter_in_place_reads_the_heap) {
    on_all([](Group& g, bool in_heap) {
        const auto n = static_cast<size_t>(g.size()), me = static_cast<size_t>(g.rank());
        Room x(g, kCount * n, in_heap);
        x.fill(kCount * n, g.rank());
        Call call{Op::reduce_scatter, DType::i32, Reduction::sum, -1, {}, {}};
        call.inputs = x.blocks(n, kCount);
        call.outputs = {call.inputs[me]};
        CHECK(g.run(call) == Status::ok);
        const int32_t first =
            g.size() * (g.rank() * static_cast<int32_t>(kCount)) + g.size() * (g.size() - 1) / 2;
        x.expect(me, kCount, first, g.size());
    });
}

TEST(a_rank_reduces_in_place_in_the_heap_while_others_write_elsewhere) {
    on_all([](Group& g, bool in_heap) {
        const int n = g.size();
        const bool in_place = g.rank() == n - 1;
        Room x(g, kCount, in_heap), out(g, kCount, in_heap);
        x.fill(kCount, g.rank());
        Call call{Op::all_reduce, DType::i32, Reduction::sum, -1, {}, {x.block(0, kCount)}};
        if (!in_place) {
            call.inputs = call.outputs;
            call.outputs = {out.block(0, kCount)};
        }
        CHECK(g.run(call) == Status::ok);
        (in_place ? x : out).expect(0, kCount, n * (n - 1) / 2, n);
        if (!in_place) x.expect(0, kCount, g.rank());
    });
}

TEST(all_to_all_in_the_heap_in_place_and_not) {
    on_all([](Group& g, bool in_heap) {
        const auto n = static_cast<size_t>(g.size());
        Room in(g, kCount * n, in_heap), out(g, kCount * n, in_heap);
        for (bool in_place : {false, true}) {
            Room& to = in_place ? in : out;
            in.fill(kCount * n, g.rank() * 1000);
            Call call{Op::all_to_all, DType::i32, Reduction::none, -1, {}, {}};
            call.inputs = in.blocks(n, kCount);
            call.outputs = to.blocks(n, kCount);
            CHECK(g.run(call) == Status::ok);
            for (size_t r = 0; r < n; r++) {
                to.expect(r, kCount,
                          static_cast<int32_t>(r) * 1000 + g.rank() * static_cast<int32_t>(kCount));
            }
        }
    });
}

TEST(large_results_are_streamed) {
    on_threads(2, [](Group& g) {
        for (bool in_heap : {true, false}) {
            Room x(g, kLarge, in_heap);
            for (int root : {0, 1}) {
                x.fill(kLarge, g.rank() + 7);
                Call call{Op::broadcast, DType::i32, Reduction::none, root, {}, {}};
                call.outputs = {x.block(0, kLarge)};
                CHECK(g.run(call) == Status::ok);
                x.expect(0, kLarge, root + 7);
            }
        }
    });
}

TEST(the_way_cannot_be_seen_in_the_bits) {
    for (int n : {2, 3}) {
        on_threads(n, [](Group& g) {
            constexpr size_t kFloats = 700'001;  // several chunks
            Room shared(g, kFloats, true), own(g, kFloats, false);
            auto* a = reinterpret_cast<float*>(shared.data);
            auto* b = reinterpret_cast<float*>(own.data);
            for (size_t i = 0; i < kFloats; i++) {
                a[i] = b[i] = 1.0f / static_cast<float>(i + 1 + static_cast<size_t>(g.rank()) * 77);
            }
            CHECK(g.all_reduce(shared.block(0, kFloats), DType::f32, Reduction::avg) == Status::ok);
            CHECK(g.all_reduce(own.block(0, kFloats), DType::f32, Reduction::avg) == Status::ok);
            CHECK(std::memcmp(a, b, kFloats * sizeof(float)) == 0);
        });
    }
}

// A block of `count` numbers that is every rank's.
std::shared_ptr<HeapMemory> node_shared(Group& g, size_t count) {
    Status s = Status::ok;
    auto block = g.host_shared_empty(count * sizeof(int32_t), s);
    CHECK(s == Status::ok);
    return block;
}

int32_t* numbers_of(const std::shared_ptr<HeapMemory>& block) {
    return reinterpret_cast<int32_t*>(block->data);
}

Status wait_for_all(Group& g) {
    Call call;
    call.op = Op::barrier;
    return g.run(call);
}

TEST(a_node_shared_block_is_one_memory_for_all_ranks) {
    for (int n : {1, 2, 3, 5}) {
        on_processes(n, [](Group& g) {
            const auto block = node_shared(g, kCount);
            int32_t* data = numbers_of(block);
            const size_t per_rank = kCount / static_cast<size_t>(g.size());
            const size_t from = static_cast<size_t>(g.rank()) * per_rank;
            for (size_t i = from; i < from + per_rank; i++) data[i] = static_cast<int32_t>(i) + 7;
            CHECK(wait_for_all(g) == Status::ok);
            for (size_t i = 0; i < per_rank * static_cast<size_t>(g.size()); i++) {
                CHECK(data[i] == static_cast<int32_t>(i) + 7);
            }
            CHECK(wait_for_all(g) == Status::ok);
        });
    }
}

TEST(collectives_take_a_node_shared_block_for_equal_tensors) {
    for (int n : {2, 3, 5}) {
        for (size_t count : {size_t{5}, kCount, kLarge}) {  // inlined, zero-copy, streamed
            on_processes(n, [&](Group& g) {
                const auto block = node_shared(g, count);
                int32_t* data = numbers_of(block);
                if (g.rank() == 0) {
                    for (size_t i = 0; i < count; i++) data[i] = static_cast<int32_t>(i);
                }
                Call call{Op::broadcast, DType::i32, Reduction::none, 0, {}, {}};
                call.outputs = {{block->data, count * sizeof(int32_t)}};
                CHECK(g.run(call) == Status::ok);
                for (size_t i = 0; i < count; i++) CHECK(data[i] == static_cast<int32_t>(i));
                CHECK(wait_for_all(g) == Status::ok);
                if (count == kCount) {
                    CHECK(g.all_reduce(call.outputs[0], DType::i32, Reduction::sum) == Status::ok);
                    for (size_t i = 0; i < count; i++) {
                        CHECK(data[i] == g.size() * static_cast<int32_t>(i));
                    }
                    CHECK(wait_for_all(g) == Status::ok);
                }
            });
        }
    }
}

TEST(ranks_reduce_their_parts_of_one_node_shared_block) {
    on_processes(3, [](Group& g) {
        const auto block = node_shared(g, 3 * kCount);
        int32_t* part = numbers_of(block) + static_cast<size_t>(g.rank()) * kCount;
        for (size_t i = 0; i < kCount; i++) part[i] = static_cast<int32_t>(i) + g.rank();
        const Block tensor{reinterpret_cast<std::byte*>(part), kCount * sizeof(int32_t)};
        CHECK(g.all_reduce(tensor, DType::i32, Reduction::sum) == Status::ok);
        for (size_t i = 0; i < kCount; i++) CHECK(part[i] == 3 * static_cast<int32_t>(i) + 3);
        CHECK(wait_for_all(g) == Status::ok);
    });
}

TEST(tensors_lie_at_other_offsets_on_each_rank) {
    on_processes(3, [](Group& g) {
        std::vector<std::shared_ptr<HeapMemory>> before;
        for (int i = 0; i <= g.rank(); i++) before.push_back(g.heap().allocate(70'000, false));
        Room x(g, kCount, true);
        for (size_t i = 0; i < kCount; i++) x.data[i] = g.rank() + 1;
        CHECK(g.all_reduce(x.block(0, kCount), DType::i32, Reduction::sum) == Status::ok);
        for (size_t i = 0; i < kCount; i++) CHECK(x.data[i] == 6);
    });
}

TEST(a_premultiplied_sum_takes_each_ranks_factor_in_every_way) {
    for (int n : {1, 2, 3}) {
        on_threads(n, [n](Group& g) {
            for (size_t count : {size_t{3}, size_t{1000}, size_t{700'001}}) {
                for (bool in_heap : {false, true}) {
                    Room room(g, count, in_heap);
                    auto* x = reinterpret_cast<float*>(room.data);
                    for (size_t i = 0; i < count; i++) x[i] = static_cast<float>(i % 1000);
                    Call call{Op::all_reduce, DType::f32, Reduction::premul_sum, -1, {}, {}};
                    call.outputs = {room.block(0, count)};
                    call.factor = 0.5 * (g.rank() + 1);
                    CHECK(g.run(call) == Status::ok);
                    const float factors = 0.25f * static_cast<float>(n * (n + 1));
                    for (size_t i = 0; i < count; i++) {
                        CHECK(x[i] == factors * static_cast<float>(i % 1000));
                    }
                }
            }
        });
    }
}

}  // namespace
}  // namespace dure
