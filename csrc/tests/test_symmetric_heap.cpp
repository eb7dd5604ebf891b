// Allocating and freeing in the symmetric heap, and what peers see of it.
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <atomic>
#include <random>

#include "forking.h"
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

// A forked child that runs `body` on request.
class Child {
  public:
    explicit Child(const std::function<void()>& body) {
        CHECK(pipe(go_) == 0);
        pid_ = fork();
        if (pid_ != 0) return;
        char byte = 0;
        close(go_[1]);
        CHECK(read(go_[0], &byte, 1) == 1);
        body();
        std::_Exit(0);
    }
    void run() {
        CHECK(write(go_[1], "!", 1) == 1);
        int status = 0;
        waitpid(pid_, &status, 0);
        CHECK(status == 0);
        close(go_[0]);
        close(go_[1]);
    }

  private:
    int go_[2];
    pid_t pid_;
};

void fill(const std::shared_ptr<HeapMemory>& memory, int value) {
    std::memset(memory->data, value, memory->bytes);
}

bool all_are(const std::shared_ptr<HeapMemory>& memory, int value) {
    for (size_t i = 0; i < memory->bytes; i++) {
        if (memory->data[i] != static_cast<std::byte>(value)) return false;
    }
    return true;
}

TEST(what_a_forked_child_writes_stays_in_it) {
    auto one = heap().allocate(3 * kPage, true), two = heap().allocate(1 << 20, true, true);
    auto shared = heap().allocate_node_shared(100, {self()});
    Child child([&] {
        for (const auto& memory : {one, two, shared}) {
            fill(memory, 2);
            CHECK(all_are(memory, 2));
        }
    });
    child.run();
    for (const auto& memory : {one, two, shared}) CHECK(all_are(memory, 0));
}

TEST(a_forked_child_keeps_copied_memory_that_its_parent_changes_and_frees) {
    for (const size_t bytes : {size_t{100}, 5 * kPage, size_t{3} << 20}) {
        auto copied = heap().allocate(bytes, false, true), shown = heap().allocate(bytes, false);
        fill(copied, 1);
        fill(shown, 1);
        auto in_child = std::make_shared<HeapMemory>(copied->data, bytes, nullptr);
        auto seen = std::make_shared<HeapMemory>(shown->data, bytes, nullptr);
        Child child([&] {
            CHECK(all_are(in_child, 1));
            CHECK(all_are(seen, 3));  // by design: it has not written there
            // A child of the child has what the child has.
            fill(in_child, 5);
            Child grandchild([&] { CHECK(all_are(in_child, 5)); });
            fill(in_child, 6);
            grandchild.run();
        });
        copied.reset();
        fill(in_child, 2);  // as another tensor does, that gets the memory
        fill(shown, 3);
        child.run();
        CHECK(all_are(in_child, 2));
    }
}

TEST(a_forked_child_keeps_a_retired_piece_beside_others) {
    auto before = heap().allocate(kPage, true), retired = heap().allocate(kPage, true),
         after = heap().allocate(kPage, true);
    heap().retire(retired->data);
    fill(retired, 4);
    Child child([&] {
        CHECK(all_are(retired, 4));
        fill(before, 9);
        fill(after, 9);
    });
    child.run();
    CHECK(all_are(before, 0) && all_are(after, 0));
}

TEST(of_too_much_copied_memory_the_largest_pieces_are_not_copied) {
    CHECK(CopiedInChildren::not_copied() == 0);
    auto large = heap().allocate(kMostCopied - kPage, false, true);
    CHECK(CopiedInChildren::not_copied() == 0);
    auto small = heap().allocate(2 * kPage, false, true);
    CHECK(CopiedInChildren::not_copied() == kMostCopied - kPage);
    large->data[0] = small->data[0] = std::byte{1};
    Child child([&] {
        CHECK(small->data[0] == std::byte{1});
        CHECK(large->data[0] == std::byte{2});
    });
    large->data[0] = small->data[0] = std::byte{2};
    child.run();
    large.reset();
    CHECK(CopiedInChildren::not_copied() == 0);
}

TEST(a_forked_child_has_copies_of_what_a_peer_has_given) {
    on_processes(2, [](Group& g) {
        auto memory = heap().allocate(1 << 20, true);
        std::vector<int64_t> offsets(2);
        offsets[static_cast<size_t>(g.rank())] = memory->data - heap().base();
        CHECK(g.all_reduce(block_of(offsets), DType::i64, Reduction::sum) == Status::ok);
        if (g.rank() == 0) {
            std::byte* theirs = g.process(1)->heap() + offsets[1];
            const CopiedInChildren copied(theirs, 1000);
            Child child([&] {
                CHECK(theirs[0] == std::byte{0});
                theirs[0] = theirs[kPage] = std::byte{2};
            });
            theirs[0] = std::byte{1};
            child.run();
        }
        CHECK(g.run({Op::barrier}) == Status::ok);
        CHECK(g.rank() == 0 || memory->data[0] == std::byte{1});
        CHECK(memory->data[kPage] == std::byte{0});
    });
}

// The system clears what a large piece gets, page by page; what another thread frees and allocates
// meanwhile is done before the end of that. The file tells how far it is.
TEST(a_small_piece_is_freed_while_the_system_gives_memory_to_a_large_one) {
    constexpr size_t kLarge = size_t{512} << 20;
    heap().trim();
    for (int attempt = 0; attempt < 20; attempt++) {
        auto small = heap().allocate(kPage, false);
        const size_t before = memory_of_file();
        std::atomic<bool> over{false};
        std::thread thread([&] {
            auto large = heap().allocate(kLarge, false);
            over = true;
        });
        bool between = false;
        while (!between && !over) {
            if (memory_of_file() < before + kLarge / 64) continue;
            small.reset();
            small = heap().allocate(kPage, false);
            between = memory_of_file() < before + kLarge;
            break;
        }
        thread.join();
        heap().trim();
        if (between) return;
    }
    CHECK(!"each time the large piece was there first");
}

TEST(pages_of_64_kib_are_given_and_taken_as_a_whole) {
    constexpr size_t kLargePage = 64 * 1024;
    SymmetricHeap other(kLargePage, 1);
    CHECK(other.mapping()->bytes() % kLargePage == 0);
    auto one = other.allocate(100, true), two = other.allocate(kLargePage + 1, true);
    for (const auto& memory : {one, two})
        CHECK(static_cast<size_t>(memory->data - other.base()) % kLargePage == 0);
    CHECK(other.usage().used == 3 * kLargePage);
    other.retire(one->data);
    CHECK(!other.shares(one->data, 100));
    const auto peer = MemoryFile::open_of(getpid(), other.file()).map();
    peer->data()[one->data - other.base()] = std::byte{1};
    CHECK(one->data[0] == std::byte{0});
    two.reset();
    CHECK(other.trim() == 2 * kLargePage);
}

// The text of the exception that `body` throws.
std::string error_of(const std::function<void()>& body) {
    try {
        body();
    } catch (const std::exception& error) {
        return error.what();
    }
    return "";
}

void limit(int resource, size_t bytes) {
    const rlimit now{bytes, RLIM_INFINITY};
    CHECK(setrlimit(static_cast<__rlimit_resource_t>(resource), &now) == 0);
}

TEST(a_heap_fits_into_the_limit_of_file_sizes) {
    in_child([] {
        limit(RLIMIT_FSIZE, 32 << 20);
        CHECK(SymmetricHeap(kPage, 2).mapping()->bytes() == 32 << 20);
        limit(RLIMIT_FSIZE, 1 << 20);
        const std::string error = error_of([] { SymmetricHeap none(kPage, 2); });
        CHECK(error.find("RLIMIT_FSIZE") != std::string::npos);
    });
}

size_t used_addresses() {
    std::FILE* statm = std::fopen("/proc/self/statm", "r");
    size_t pages = 0;
    CHECK(statm && std::fscanf(statm, "%zu", &pages) == 1);
    std::fclose(statm);
    return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

TEST(the_heaps_of_all_ranks_fit_into_the_limit_of_addresses) {
    in_child([] {
        limit(RLIMIT_AS, used_addresses() + (size_t{1} << 30));
        std::vector<std::shared_ptr<Mapping>> peers;
        const SymmetricHeap own(kPage, 4);
        CHECK(own.mapping()->bytes() > 64 << 20);
        for (int peer = 1; peer < 4; peer++)
            peers.push_back(MemoryFile::open_of(getpid(), own.file()).map());
        limit(RLIMIT_AS, used_addresses() + (3 << 20));  // too few for the smallest heap
        const std::string error = error_of([] { SymmetricHeap none(kPage, 2); });
        CHECK(error.find("RLIMIT_AS") != std::string::npos);
    });
}

// A filter of system calls that answers memfd_create with `error`, if bit 3 of its flags
// (MFD_NOEXEC_SEAL) is, or is not, set.
void refuse_memory_files(bool sealed, int error) {
    const uint8_t allows_sealed = sealed ? 0 : 1, allows_others = sealed ? 1 : 0;
    sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_memfd_create, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, 8, allows_sealed, allows_others),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog filter{std::size(code), code};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0);
}

TEST(a_memory_file_is_made_where_the_system_forbids_files_that_can_be_executed) {
    in_child([] {
        refuse_memory_files(false, EACCES);  // vm.memfd_noexec=2
        CHECK(error_of([] { MemoryFile::create("test", kPage); }).empty());
    });
}

TEST(a_memory_file_is_made_where_the_system_does_not_know_of_that) {
    in_child([] {
        refuse_memory_files(true, EINVAL);
        CHECK(error_of([] { MemoryFile::create("test", kPage); }).empty());
    });
}

}  // namespace
}  // namespace dure
