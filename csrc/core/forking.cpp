// See the note "Forked children" in forking.h.
#include "forking.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <vector>

#include "process.h"
#include "symmetric_heap.h"

namespace dure {

namespace {

// Copies of smaller pieces are written into the child's mapping: one that takes its place would
// cost a mapping each, and a process may have some 65,000.
constexpr size_t kLeastMoved = 64 * 1024;

struct Piece {
    std::byte* data;
    size_t bytes;
};

struct Registry {
    std::mutex lock;
    std::map<std::byte*, size_t> pieces;
    size_t bytes = 0;

    // Those that a fork copies.
    std::vector<Piece> chosen() const {
        std::vector<Piece> all;
        all.reserve(pieces.size());
        for (const auto& [data, length] : pieces) all.push_back({data, length});
        if (bytes <= kMostCopied) return all;
        std::sort(all.begin(), all.end(),
                  [](const Piece& a, const Piece& b) { return a.bytes < b.bytes; });
        size_t sum = 0, count = 0;
        while (count < all.size() && sum + all[count].bytes <= kMostCopied)
            sum += all[count++].bytes;
        all.resize(count);
        return all;
    }
};

Registry& registry() {
    static Registry* one = new Registry;  // outlives every tensor
    return *one;
}

// Whole pages, since only these can be moved.
struct Copy {
    std::byte* to;
    size_t bytes;
    std::byte* from;
};

// From `prepare` to the end of the handlers; the lock of the registry is held until then.
struct Fork {
    int pid = 0;  // of the parent
    SymmetricHeap* heap = nullptr;
    std::byte* copied = nullptr;
    size_t copied_bytes = 0;
    std::vector<Copy> copies;
};

Fork& under_way() {
    static Fork* one = new Fork;
    return *one;
}

void copy_pieces(Fork& fork) {
    static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    for (const Piece& piece : registry().chosen()) {
        const auto at = reinterpret_cast<uintptr_t>(piece.data);
        const uintptr_t begin = at / page * page, end = (at + piece.bytes + page - 1) / page * page;
        fork.copies.push_back({reinterpret_cast<std::byte*>(begin), end - begin, nullptr});
        fork.copied_bytes += end - begin;
    }
    if (fork.copies.empty()) return;
    void* made = mmap(nullptr, fork.copied_bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return fork.copies.clear();
    madvise(made, fork.copied_bytes, MADV_HUGEPAGE);  // 256 MiB take 40 ms instead of 130
    fork.copied = static_cast<std::byte*>(made);
    std::byte* next = fork.copied;
    for (Copy& copy : fork.copies) {
        copy.from = next;
        std::memcpy(next, copy.to, copy.bytes);
        next += copy.bytes;
    }
}

void release(Fork& fork) {
    if (fork.copied) munmap(fork.copied, fork.copied_bytes);
    fork = {};
    registry().lock.unlock();
    SymmetricHeap::unlock_after_fork();
    Process::lock().unlock();
}

// Locks are taken in the order in which the heap's own code takes them.
void prepare() {
    Fork& fork = under_way();
    Process::lock().lock();
    fork.pid = getpid();
    fork.heap = SymmetricHeap::lock_for_fork();
    registry().lock.lock();
    try {
        copy_pieces(fork);
    } catch (const std::bad_alloc&) {  // fork() takes no exceptions; the child then has no copies
        fork.copies.clear();
    }
}

void after_in_parent() { release(under_way()); }

void after_in_child() {
    Fork& fork = under_way();
    std::vector<Piece> private_now;
    if (fork.heap) {
        for (const auto& [begin, end] : fork.heap->map_privately())
            private_now.push_back({fork.heap->base() + begin, end - begin});
    }
    for (const auto& process : Process::all_known_to(fork.pid)) {
        if (!process->is_self() && process->map_privately())
            private_now.push_back({process->heap(), process->heap_bytes()});
    }
    const auto is_private = [&](const Copy& copy) {
        return std::any_of(private_now.begin(), private_now.end(), [&](const Piece& part) {
            return part.data <= copy.to && copy.to + copy.bytes <= part.data + part.bytes;
        });
    };
    for (const Copy& copy : fork.copies) {
        constexpr int kThere = MREMAP_MAYMOVE | MREMAP_FIXED;
        const bool writable = is_private(copy);
        if (writable && copy.bytes < kLeastMoved)
            std::memcpy(copy.to, copy.from, copy.bytes);
        else if (mremap(copy.from, copy.bytes, copy.bytes, kThere, copy.to) == MAP_FAILED &&
                 writable)
            std::memcpy(copy.to, copy.from, copy.bytes);
    }
    registry().pieces.clear();
    registry().bytes = 0;
    release(fork);
}

}  // namespace

CopiedInChildren::CopiedInChildren(std::byte* data, size_t bytes) : data_(data), bytes_(bytes) {
    Registry& all = registry();
    std::lock_guard hold(all.lock);
    all.pieces[data] = bytes;
    all.bytes += bytes;
}

// In a forked child those of the parent are no longer registered.
CopiedInChildren::~CopiedInChildren() {
    Registry& all = registry();
    std::lock_guard hold(all.lock);
    if (all.pieces.erase(data_) != 0) all.bytes -= bytes_;
}

size_t CopiedInChildren::not_copied() {
    Registry& all = registry();
    std::lock_guard hold(all.lock);
    if (all.bytes <= kMostCopied) return 0;
    size_t copied = 0;
    for (const Piece& piece : all.chosen()) copied += piece.bytes;
    return all.bytes - copied;
}

void handle_forks() {
    static const int handled = pthread_atfork(&prepare, &after_in_parent, &after_in_child);
    static_cast<void>(handled);
}

}  // namespace dure
