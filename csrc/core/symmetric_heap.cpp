// See the note "Symmetric heap" in symmetric_heap.h.
#include "symmetric_heap.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "forking.h"

namespace dure {

namespace {

constexpr uint64_t kNowhere = 0;  // the process' own page lies there
constexpr size_t kLeastBytes = size_t{64} << 20;
constexpr size_t kLeastUnderLimits = size_t{4} << 20;
constexpr size_t kUnknownProcesses = 16;  // that map each other's heaps, where nobody said
// 256 processes of a host map each other's: together they stay within the 47 bits of addresses.
constexpr size_t kMostBytes = size_t{256} << 30;

size_t system_page() {
    static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return bytes;
}

size_t host_memory() {
    const long pages = sysconf(_SC_PHYS_PAGES);
    const size_t bytes = pages > 0 ? static_cast<size_t>(pages) * system_page() : kMostBytes;
    return std::clamp(bytes, kLeastBytes, kMostBytes);
}

// Addresses that this process uses; 0 if that is not known.
size_t used_addresses() {
    std::FILE* file = std::fopen("/proc/self/statm", "re");
    if (!file) return 0;
    size_t pages = 0;
    const bool found = std::fscanf(file, "%zu", &pages) == 1;
    std::fclose(file);
    return found ? pages * system_page() : 0;
}

size_t heap_bytes(int num_processes) {
    size_t bytes = std::min(host_memory(), limit_on(RLIMIT_FSIZE));
    if (const size_t limit = limit_on(RLIMIT_AS); limit != SIZE_MAX) {
        const size_t heaps =
            num_processes > 0 ? static_cast<size_t>(num_processes) : kUnknownProcesses;
        const size_t used = used_addresses();
        bytes = std::min(bytes, (limit > used ? limit - used : 0) / 2 / heaps);
    }
    return std::max(bytes, kLeastUnderLimits);
}

// The heap of this process, and the lock under which it is made. Never destroyed: tensors of any
// age are in the heap.
struct Made {
    std::mutex lock;
    std::atomic<SymmetricHeap*> heap{nullptr};
};

Made& made() {
    static Made* one = new Made;
    return *one;
}

std::shared_ptr<Mapping> map_of(const MemoryFile& file) {
    std::shared_ptr<Mapping> mapping = file.map();
    madvise(mapping->data(), mapping->bytes(), MADV_DONTDUMP);
    return mapping;
}

}  // namespace

// A forked child begins its own; the parent's, which it has inherited, it leaves alone.
SymmetricHeap& SymmetricHeap::of_process(int num_processes) {
    SymmetricHeap* now = made().heap.load(std::memory_order_acquire);
    if (now != nullptr && now->pid_ == getpid()) return *now;
    handle_forks();
    std::lock_guard hold(made().lock);
    now = made().heap.load(std::memory_order_acquire);
    if (now == nullptr || now->pid_ != getpid()) {
        now = new SymmetricHeap(std::max(system_page(), kPage), num_processes);
        made().heap.store(now, std::memory_order_release);
    }
    return *now;
}

// The computed size may still not fit; then half of it is tried, and so on.
SymmetricHeap::SymmetricHeap(size_t page_bytes, int num_processes)
    : page_(page_bytes), pid_(getpid()) {
    for (size_t bytes = heap_bytes(num_processes) / page_ * page_;;
         bytes = round_up(bytes / 2, page_)) {
        try {
            file_ = MemoryFile::create("dure-heap", bytes);
            mapping_ = map_of(file_);
            break;
        } catch (const std::system_error&) {
            if (bytes / 2 < kLeastUnderLimits) throw;
        }
    }
    base_ = mapping_->data();
    bytes_ = mapping_->bytes();
    auto* own = new (base_) ProcessPage{};
    own->magic = kMagic;
    own->pid = pid_;
    own->start_time = start_time_of(pid_);
    put_back(page_, bytes_ - page_, false);
}

// ---- allocating ---------------------------------------------------------------------------------

uint64_t SymmetricHeap::take_from(bool warm, size_t bytes) {
    const auto found = by_size_[warm].lower_bound({bytes, 0});
    if (found == by_size_[warm].end()) return kNowhere;
    const auto [length, offset] = *found;
    by_size_[warm].erase(found);
    free_[warm].erase(offset);
    if (length > bytes) {
        free_[warm][offset + bytes] = length - bytes;
        by_size_[warm].insert({length - bytes, offset + bytes});
    }
    if (warm) warm_bytes_ -= bytes;
    return offset;
}

// Let the system do `work` on pages that are on no list.
template <typename F>
auto SymmetricHeap::without(Lock& hold, F work) {
    num_away_++;
    hold.unlock();
    const auto result = work();
    hold.lock();
    num_away_--;
    settled_.notify_all();
    return result;
}

// Pages that have memory; `warm` tells whether they had it before.
uint64_t SymmetricHeap::take(Lock& hold, size_t bytes, bool& warm) {
    for (bool trimmed = false;;) {
        warm = true;
        if (const uint64_t offset = take_from(true, bytes); offset != kNowhere) return offset;
        warm = false;
        if (const uint64_t offset = take_from(false, bytes); offset != kNowhere) {
            if (without(hold, [&] { return give_memory(offset, bytes); })) return offset;
            // Some pages may already have memory.
            const bool cold = without(hold, [&] { return take_memory(offset, bytes); });
            put_back(offset, bytes, !cold);
        }
        if (num_away_ != 0) {  // what others have there may be what is missing here
            settled_.wait(hold);
            continue;
        }
        if (trimmed || trim(hold) == 0) return kNowhere;
        trimmed = true;
    }
}

// Touching a page that the system has no memory for would end the process, so it is asked for all
// of them first.
bool SymmetricHeap::give_memory(uint64_t offset, size_t bytes) {
    while (madvise(base_ + offset, bytes, MADV_POPULATE_WRITE) != 0) {
        if (errno == EINTR || errno == EAGAIN) continue;
        if (errno != EINVAL) return false;
        // Before Linux 5.14.
        return fallocate(file_.fd(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0;
    }
    return true;
}

bool SymmetricHeap::take_memory(uint64_t offset, size_t bytes) {
    return fallocate(file_.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                     static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0;
}

uint64_t SymmetricHeap::allocate_piece(size_t bytes, bool zeroed, bool node_shared) {
    const size_t length = round_up(std::max(bytes, size_t{1}), page_);
    if (length < bytes || length > bytes_) return kNowhere;
    uint64_t offset = kNowhere;
    bool warm = false;
    {
        Lock hold(lock_);
        reclaim(hold);
        offset = take(hold, length, warm);
        if (offset == kNowhere) return kNowhere;
        used_[offset] = {.bytes = length, .node_shared = node_shared};
        used_bytes_ += length;
    }
    if (zeroed && warm) std::memset(base_ + offset, 0, bytes);
    return offset;
}

std::shared_ptr<HeapMemory> SymmetricHeap::allocate(size_t bytes, bool zeroed, bool copied) {
    const uint64_t offset = allocate_piece(bytes, zeroed, false);
    if (offset == kNowhere) return nullptr;
    std::byte* data = base_ + offset;
    std::shared_ptr<CopiedInChildren> copies;
    if (copied) copies = std::make_shared<CopiedInChildren>(data, bytes);
    auto give_back = [this, offset, copies, pid = pid_](const void*) mutable {
        copies.reset();  // first: a fork would copy what another tensor has by then
        if (getpid() != pid) return;
        Lock hold(lock_);
        drop(hold, offset);
    };
    return std::make_shared<HeapMemory>(data, bytes, std::shared_ptr<const void>(data, give_back));
}

// ---- freeing ------------------------------------------------------------------------------------

void SymmetricHeap::put_back(uint64_t offset, size_t bytes, bool warm) {
    if (warm) warm_bytes_ += bytes;
    auto& pieces = free_[warm];
    auto& sizes = by_size_[warm];
    auto after = pieces.lower_bound(offset);
    if (after != pieces.begin()) {
        const auto before = std::prev(after);
        if (before->first + before->second == offset) {
            offset = before->first;
            bytes += before->second;
            sizes.erase({before->second, before->first});
            pieces.erase(before);
        }
    }
    if (after != pieces.end() && offset + bytes == after->first) {
        bytes += after->second;
        sizes.erase({after->second, after->first});
        pieces.erase(after);
    }
    pieces[offset] = bytes;
    sizes.insert({bytes, offset});
}

void SymmetricHeap::drop(Lock& hold, uint64_t offset) {
    const auto found = used_.find(offset);
    const Piece piece = std::move(found->second);
    used_bytes_ -= piece.bytes;
    if (piece.retired) {  // its private memory goes; its addresses stay taken, and on the list
        without(hold, [&] { return madvise(base_ + offset, piece.bytes, MADV_DONTNEED); });
        return;
    }
    used_.erase(found);
    bool warm = warm_bytes_ + piece.bytes <= kept_;
    if (!warm) warm = without(hold, [&] { return !take_memory(offset, piece.bytes); });
    put_back(offset, piece.bytes, warm);
}

size_t SymmetricHeap::trim(Lock& hold) {
    size_t given = 0;
    by_size_[true].clear();
    warm_bytes_ = 0;
    for (const auto& [offset, bytes] : std::exchange(free_[true], {})) {
        const bool cold = without(hold, [&] { return take_memory(offset, bytes); });
        put_back(offset, bytes, !cold);
        if (cold) given += bytes;
    }
    return given;
}

size_t SymmetricHeap::trim() {
    if (getpid() != pid_) return 0;
    Lock hold(lock_);
    reclaim(hold);
    return trim(hold);
}

void SymmetricHeap::set_kept(size_t bytes) {
    Lock hold(lock_);
    kept_ = bytes;
    if (warm_bytes_ > kept_ && getpid() == pid_) trim(hold);
}

SymmetricHeap::Usage SymmetricHeap::usage() {
    Lock hold(lock_);
    reclaim(hold);
    return {used_bytes_, warm_bytes_, used_.size() - static_cast<size_t>(num_retired_.load())};
}

// ---- retired ------------------------------------------------------------------------------------

bool SymmetricHeap::is_retired(uint64_t offset) const {
    std::lock_guard hold(lock_);
    const auto after = used_.upper_bound(offset);
    if (after == used_.begin()) return false;
    const auto& [begin, piece] = *std::prev(after);
    return piece.retired && offset < begin + piece.bytes;
}

void SymmetricHeap::retire(const std::byte* data) {
    const auto offset = static_cast<size_t>(data - base_);
    if (offset >= bytes_ || getpid() != pid_) return;
    uint64_t begin = 0;
    size_t bytes = 0;
    {
        std::lock_guard hold(lock_);
        const auto after = used_.upper_bound(offset);
        if (after == used_.begin()) return;
        auto& [at, piece] = *std::prev(after);
        if (offset >= at + piece.bytes || piece.retired || piece.node_shared) return;
        // Whatever follows, peers no longer look for it here, and nobody gets it again.
        piece.retired = true;
        num_retired_.fetch_add(1, std::memory_order_release);
        begin = at;
        bytes = piece.bytes;
    }
    // The caller's operation keeps the tensor. The private copy takes the place of the shared pages
    // in one step, so that other threads of this process, which may read the tensor, find memory
    // there at every moment. Where there is no memory for a copy, the tensor can still change under
    // its owner.
    constexpr int kPrivate = MAP_PRIVATE | MAP_ANONYMOUS;
    void* copy = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kPrivate, -1, 0);
    if (copy == MAP_FAILED) return;
    std::memcpy(copy, base_ + begin, bytes);
    constexpr int kThere = MREMAP_MAYMOVE | MREMAP_FIXED;
    if (mremap(copy, bytes, bytes, kThere, base_ + begin) == MAP_FAILED) munmap(copy, bytes);
}

// ---- forked children (forking.h) ----------------------------------------------------------------

SymmetricHeap* SymmetricHeap::lock_for_fork() {
    made().lock.lock();
    SymmetricHeap* now = made().heap.load(std::memory_order_acquire);
    if (now != nullptr) now->lock_.lock();
    return now != nullptr && now->pid_ == getpid() ? now : nullptr;
}

void SymmetricHeap::unlock_after_fork() {
    if (SymmetricHeap* now = made().heap.load(std::memory_order_acquire)) now->lock_.unlock();
    made().lock.unlock();
}

// Not the first page, by which peers know whose heap it is, nor what was retired, which is private
// already.
std::vector<std::pair<uint64_t, uint64_t>> SymmetricHeap::map_privately() const {
    std::vector<std::pair<uint64_t, uint64_t>> runs;
    bool joins = false;
    for (const auto& [offset, piece] : used_) {
        if (!piece.retired && joins)
            runs.back().second = offset + piece.bytes;
        else if (!piece.retired)
            runs.emplace_back(offset, offset + piece.bytes);
        joins = !piece.retired;
    }
    std::erase_if(runs, [this](const auto& run) {
        return !file_.map_privately(base_ + run.first, run.second - run.first, run.first);
    });
    return runs;
}

// ---- node-shared --------------------------------------------------------------------------------

std::shared_ptr<HeapMemory> SymmetricHeap::allocate_node_shared(
    size_t bytes, const std::vector<std::shared_ptr<Process>>& holders, bool zeroed,
    bool lendable) {
    const uint64_t offset = allocate_piece(kPage + bytes, zeroed, true);
    if (offset == kNowhere) return nullptr;
    if (!zeroed) std::memset(base_ + offset, 0, kPage);
    for (size_t i = 0; i < holders.size(); i++) holds(offset)[i].store(1);
    {
        std::lock_guard hold(lock_);
        Piece& piece = used_.at(offset);
        piece.holders = holders;
        piece.lendable = lendable;
    }
    // When its owner drops it, others may still hold it: `reclaim` finds out.
    auto lend = [this, offset, pid = pid_](const void*) {
        if (getpid() != pid) return;
        holds(offset)[0].store(0);
        std::lock_guard hold(lock_);
        lent_.push_back(offset);
    };
    std::byte* data = base_ + offset + kPage;
    return std::make_shared<HeapMemory>(data, bytes, std::shared_ptr<const void>(data, lend));
}

std::shared_ptr<HeapMemory> SymmetricHeap::hold_node_shared(const std::shared_ptr<Process>& owner,
                                                            const std::byte* at, size_t bytes,
                                                            int rank) {
    return hold_lent(owner, at, bytes, const_cast<std::byte*>(at) - kPage + rank);
}

std::shared_ptr<HeapMemory> SymmetricHeap::hold_lent(const std::shared_ptr<Process>& owner,
                                                     const std::byte* at, size_t bytes,
                                                     std::byte* hold) {
    auto let_go = [owner, hold, pid = getpid()](const void*) {
        if (getpid() == pid) reinterpret_cast<std::atomic<uint8_t>*>(hold)->store(0);
    };
    auto* data = const_cast<std::byte*>(at);
    return std::make_shared<HeapMemory>(data, bytes, std::shared_ptr<const void>(data, let_go));
}

uint64_t SymmetricHeap::lend(const std::byte* data, const std::shared_ptr<Process>& to) {
    const auto at = static_cast<size_t>(data - base_);
    if (at >= bytes_ || getpid() != pid_) return 0;
    std::lock_guard hold(lock_);
    const auto after = used_.upper_bound(at);
    if (after == used_.begin()) return 0;
    auto& [offset, piece] = *std::prev(after);
    if (at >= offset + piece.bytes || !piece.lendable) return 0;
    if (!to) return offset;
    std::vector<std::shared_ptr<Process>>& holders = piece.holders;
    size_t rank = 1;  // of one that holds it no longer, or one more
    while (rank < holders.size() && is_held(offset, piece, rank)) rank++;
    if (rank == kPage) return 0;
    holders.resize(std::max(holders.size(), rank + 1));
    holders[rank] = to;
    holds(offset)[rank].store(1);
    return offset + rank;
}

bool SymmetricHeap::is_held(uint64_t offset, const Piece& piece, size_t rank) const {
    const std::shared_ptr<Process>& holder = piece.holders[rank];
    return holds(offset)[rank].load() != 0 && holder && !holder->dead();
}

void SymmetricHeap::reclaim(Lock& hold) {
    std::vector<uint64_t> free;
    std::erase_if(lent_, [&](uint64_t offset) {
        const Piece& piece = used_.at(offset);
        for (size_t rank = 0; rank < piece.holders.size(); rank++) {
            if (is_held(offset, piece, rank)) return false;
        }
        free.push_back(offset);
        return true;
    });
    for (const uint64_t offset : free) drop(hold, offset);
}

}  // namespace dure
