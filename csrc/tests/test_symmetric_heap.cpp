// Allocating and freeing in the symmetric heap, and what peers see of it.
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <random>

#include "harness.h"
#include "symmetric_heap.h"

namespace dure {
namespace {

using namespace dure::testing;

SymmetricHeap& heap() { return SymmetricHeap::of_process(); }

// How much memory the heap's file has.
size_t memory_of_file() {
    struct stat info {};
    CHECK(fstat(heap().file(), &info) == 0);
    return static_cast<size_t>(info.st_blocks) * 512;
}

std::shared_ptr<Process> self() {
    return Process::of(getpid(), start_time_of(getpid()), heap().file());
}

TEST(pieces_that_live_never_overlap_whatever_the_order) {
    std::mt19937 random(7);
    struct Held {
        std::shared_ptr<HeapMemory> memory;
        uint32_t mark;
    };
    std::vector<Held> held;
    for (uint32_t k = 1; k < 20'000; k++) {
        if (held.size() < 40 && random() % 2 == 0) {
            auto memory = heap().allocate(1 + random() % 70'000, random() % 2 == 0);
            CHECK(memory != nullptr);
            std::memset(memory->data, static_cast<int>(k & 255), memory->bytes);
            held.push_back({std::move(memory), k & 255});
        } else if (!held.empty()) {
            const size_t i = random() % held.size();
            for (size_t at = 0; at < held[i].memory->bytes; at += 997) {
                CHECK(static_cast<uint32_t>(held[i].memory->data[at]) == held[i].mark);
            }
            std::swap(held[i], held.back());
            held.pop_back();
        }
        if (k % 1000 == 0) heap().trim();
    }
    held.clear();
    CHECK(heap().usage().num_pieces == 0);
    CHECK(heap().usage().used == 0);
}

TEST(a_zeroed_piece_is_zero_though_its_pages_were_used) {
    const std::byte* before = nullptr;
    {
        auto memory = heap().allocate(50'000, false);
        std::memset(memory->data, 1, memory->bytes);
        before = memory->data;
    }
    auto memory = heap().allocate(50'000, true);
    CHECK(memory->data == before);  // the same pages, kept warm
    for (size_t i = 0; i < memory->bytes; i++) CHECK(memory->data[i] == std::byte{0});
}

TEST(freed_memory_is_kept_up_to_the_limit_and_trimmed) {
    heap().trim();
    heap().set_kept(1 << 20);
    const size_t least = memory_of_file();
    { auto memory = heap().allocate(1 << 20, false); }
    CHECK(heap().usage().kept == 1 << 20);
    CHECK(memory_of_file() >= least + (1 << 20));
    { auto a = heap().allocate(1 << 20, false), b = heap().allocate(1 << 20, false); }
    CHECK(heap().usage().kept == 1 << 20);  // the second was given back at once
    CHECK(heap().trim() == 1 << 20);
    CHECK(heap().usage().kept == 0);
    CHECK(memory_of_file() == least);
    heap().set_kept(SymmetricHeap::kKeptBytes);
}

TEST(more_than_the_heap_holds_is_refused) {
    const size_t all = heap().mapping()->bytes();
    CHECK(heap().allocate(all, false) == nullptr);
    CHECK(heap().allocate(SIZE_MAX, false) == nullptr);
    CHECK(heap().allocate(SIZE_MAX - kPage / 2, false) == nullptr);
}

// The system refuses memory for pages that are not there, as it does where it has none left.
TEST(memory_that_cannot_be_had_is_refused_after_what_was_kept_is_given_back) {
    const pid_t child = fork();
    if (child == 0) {
        constexpr size_t kKept = 8 << 20;
        { auto kept = heap().allocate(kKept, false); }
        CHECK(heap().usage().kept == kKept);
        const size_t rest = heap().mapping()->bytes() - kPage - kKept;
        CHECK(munmap(heap().base() + kPage + kKept, rest) == 0);
        CHECK(heap().allocate(2 * kKept, false) == nullptr);
        CHECK(heap().usage().kept == 0);
        CHECK(heap().allocate(kKept, true) != nullptr);
        std::_Exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(status == 0);
}

TEST(a_peer_finds_a_piece_at_its_offset) {
    on_processes(2, [](Group& g) {
        auto memory = heap().allocate(10'000, true);
        // Ranks of other histories have other offsets.
        if (g.rank() == 1) memory = heap().allocate(20'000, true);
        std::vector<int64_t> offsets(2);
        offsets[static_cast<size_t>(g.rank())] = memory->data - heap().base();
        CHECK(g.all_reduce(block_of(offsets), DType::i64, Reduction::sum) == Status::ok);
        CHECK(offsets[0] != offsets[1]);
        memory->data[5] = std::byte{static_cast<unsigned char>(g.rank() + 1)};
        CHECK(g.run({Op::barrier}) == Status::ok);
        const auto peer = static_cast<size_t>(1 - g.rank());
        const std::byte* theirs = g.process(1 - g.rank())->heap() + offsets[peer];
        CHECK(theirs[5] == std::byte{static_cast<unsigned char>(peer + 1)});
        CHECK(g.run({Op::barrier}) == Status::ok);
    });
}

TEST(a_retired_piece_keeps_its_values_and_is_private_and_never_used_again) {
    auto memory = heap().allocate(3 * kPage, true);
    memory->data[kPage] = std::byte{42};
    // What a peer sees: another mapping of the same file.
    const auto peer = MemoryFile::open_of(getpid(), heap().file()).map();
    std::byte* theirs = peer->data() + (memory->data - heap().base());
    CHECK(theirs[kPage] == std::byte{42});
    CHECK(heap().shares(memory->data + kPage, 10));
    heap().retire(memory->data + kPage);
    CHECK(!heap().shares(memory->data + kPage, 10));
    CHECK(memory->data[kPage] == std::byte{42});
    theirs[kPage] = std::byte{13};  // a peer that was kept from its core writes its slice
    CHECK(memory->data[kPage] == std::byte{42});
    const std::byte* const data = memory->data;
    memory.reset();
    std::vector<std::shared_ptr<HeapMemory>> others;
    for (int k = 0; k < 50; k++) {
        others.push_back(heap().allocate(kPage, false));
        CHECK(others.back()->data < data || others.back()->data >= data + 3 * kPage);
    }
}

TEST(a_node_shared_piece_is_free_when_nobody_holds_it) {
    const size_t before = heap().usage().num_pieces;
    auto owner = self();
    auto first = heap().allocate_node_shared(5000, {owner, owner});
    auto second = SymmetricHeap::hold_node_shared(owner, first->data, 5000, 1);
    CHECK(second->data == first->data);
    first->data[4999] = std::byte{9};
    first.reset();
    CHECK(heap().usage().num_pieces == before + 1);
    CHECK(second->data[4999] == std::byte{9});
    second.reset();
    CHECK(heap().usage().num_pieces == before);
}

TEST(a_forked_child_has_a_heap_of_its_own) {
    auto memory = heap().allocate(100, true);
    memory->data[0] = std::byte{1};
    const std::byte* const base = heap().base();
    const pid_t child = fork();
    if (child == 0) {
        CHECK(heap().base() != base);
        auto own = heap().allocate(100, true);
        own->data[0] = std::byte{2};
        memory.reset();  // the parent's is not the child's to free
        std::_Exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(status == 0);
    CHECK(memory->data[0] == std::byte{1});
    CHECK(heap().usage().num_pieces >= 1);
}

}  // namespace
}  // namespace dure
