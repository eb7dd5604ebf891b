// Memory of this process that the other ranks of the host can reach.
//
// Note "Symmetric heap". Each process has one: a sparse memory file of as many bytes as the host
// has memory, which is mapped once, here and (process.h) in every process of the host that shares a
// group with this one. Under a limit of address space (RLIMIT_AS) it is smaller, so that the heaps
// of all processes of the first group together take at most half of what is left; under a limit of
// file sizes (RLIMIT_FSIZE) it is as large as that allows. Allocating and freeing are local, and in
// any order. A tensor in the heap is known to every peer by (whose heap, offset); a collective's
// header carries that (layout.h), so such a tensor takes the zero-copy way in every group whose
// ranks share the host, and tensors of one call may lie at other offsets on every rank.
//
// *Pages.* The first page is the process' own (ProcessPage). The rest is cut into whole pages of
// the system: used pieces, and free ones, which are either *warm* (they have memory) or *cold*
// (they have none). An allocation takes the smallest warm piece that fits, else cold pages, which
// are given memory there and then: where the host has none left, the warm pieces are given back
// first, and if that does not help the allocation fails, instead of the first touch of a page
// (SIGBUS). A freed piece is kept warm up to a limit; `trim` gives all warm pieces back. The system
// is asked for memory, and given it back, without the lock: it clears some 4 GiB per second, and
// a thread that frees a small tensor does
// not wait for that. Pages that the system is working on are on no list; an allocation that fails
// in the meantime waits for them and tries again.
//
// *Retired.* When a reduction fails after its header exchange, a peer that was kept from its core
// may still write its slice of the result into our tensor, whenever it goes on. So the piece's
// pages are replaced, at their addresses, by private memory with the same contents: the tensor
// stays, and what the peer writes goes to pages of the file that nobody looks at, and nobody gets
// again.
//
// *Node-shared.* A piece that several ranks hold (Group::host_shared_empty) has one page more, with
// a byte for each rank; the piece is free when no living rank holds it. The owner looks when it
// allocates. A piece that is *lendable* begins with no other holders: the owner adds one at a time
// (`lend`), as it tells processes of it (rpc.share).
//
// Threads: any. A forked child does not see the parent's pieces as its own, and gives none back;
// what it has of them is in the note "Forked children" (forking.h).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "layout.h"
#include "process.h"
#include "segment.h"

namespace dure {

// Memory that is held for as long as this lives: a piece of the own heap, or a part of a peer's.
struct HeapMemory {
    HeapMemory(std::byte* data, size_t bytes, std::shared_ptr<const void> holder)
        : data(data), bytes(bytes), holder(std::move(holder)) {}

    std::byte* const data;
    const size_t bytes;
    const std::shared_ptr<const void> holder;
};

class SymmetricHeap {
  public:
    static constexpr uint64_t kMagic = 0x7061656865727564;  // "dureheap"
    static constexpr size_t kKeptBytes = size_t{256} << 20;

    // This process' heap, made when it is first asked for; then `num_processes` is how many of
    // this host will map each other's, 0 if that is not known. Throws std::system_error, whose text
    // names the limit that leaves no room even for a small heap.
    static SymmetricHeap& of_process(int num_processes = 0);
    // With pages of `page_bytes`, a multiple of the system's. All but tests use `of_process`.
    SymmetricHeap(size_t page_bytes, int num_processes);
    SymmetricHeap(const SymmetricHeap&) = delete;
    SymmetricHeap& operator=(const SymmetricHeap&) = delete;

    ProcessPage& page() const { return *reinterpret_cast<ProcessPage*>(base_); }
    int file() const { return file_.fd(); }
    const std::shared_ptr<Mapping>& mapping() const { return mapping_; }
    std::byte* base() const { return base_; }

    // At least `bytes`, from the start of a page; with `zeroed`, zeros; with `copied`, forked
    // children get a copy (forking.h). Null: the host has no more memory, or the heap no more
    // addresses.
    std::shared_ptr<HeapMemory> allocate(size_t bytes, bool zeroed, bool copied = false);
    // As `allocate`, to be held by ranks that run in `holders`. What the caller gets holds for the
    // first of them; each of the others makes its own with `hold_node_shared`.
    std::shared_ptr<HeapMemory> allocate_node_shared(
        size_t bytes, const std::vector<std::shared_ptr<Process>>& holders, bool zeroed = true,
        bool lendable = false);
    // What rank `rank` of the holders holds of the piece that `owner` allocated and that this
    // process finds `at`.
    static std::shared_ptr<HeapMemory> hold_node_shared(const std::shared_ptr<Process>& owner,
                                                        const std::byte* at, size_t bytes,
                                                        int rank);
    // Have `to` hold the lendable piece in which `data` lies: where in this heap its byte is, which
    // it sets to 0 at the end. 0: there is no such piece, or it has too many holders. With no `to`
    // it only tells whether there is one.
    uint64_t lend(const std::byte* data, const std::shared_ptr<Process>& to);
    // What a process holds of [at, at + bytes) by the byte `hold`, both of the heap of `owner`.
    static std::shared_ptr<HeapMemory> hold_lent(const std::shared_ptr<Process>& owner,
                                                 const std::byte* at, size_t bytes,
                                                 std::byte* hold);

    // Whether [data, data + bytes) lies in this heap, in memory that peers see.
    bool shares(const std::byte* data, size_t bytes) const {
        const auto offset = static_cast<size_t>(data - base_);
        if (offset >= bytes_ || bytes > bytes_ - offset) return false;
        return num_retired_.load(std::memory_order_acquire) == 0 || !is_retired(offset);
    }
    // Replace the pages of the piece at `data` by private memory, as told above. Does nothing for
    // other memory, and for pieces that are node-shared.
    void retire(const std::byte* data);

    // Give the memory of all free pieces back to the system; returns how many bytes.
    size_t trim();
    // How much freed memory is kept.
    void set_kept(size_t bytes);

    struct Usage {
        size_t used, kept, num_pieces;
    };
    Usage usage();

    // For the handlers of fork (forking.cpp): take the locks, and return the heap of this process,
    // null if it has none; give the locks up; and in the child, with the locks, map the used part
    // of the parent's heap privately: which parts that were, as offsets.
    static SymmetricHeap* lock_for_fork();
    static void unlock_after_fork();
    std::vector<std::pair<uint64_t, uint64_t>> map_privately() const;

  private:
    using Lock = std::unique_lock<std::mutex>;
    struct Piece {
        size_t bytes;
        bool node_shared = false, retired = false, lendable = false;
        std::vector<std::shared_ptr<Process>> holders;  // of one that is node-shared
    };

    bool is_retired(uint64_t offset) const;
    uint64_t allocate_piece(size_t bytes, bool zeroed, bool node_shared);
    bool give_memory(uint64_t offset, size_t bytes);
    bool take_memory(uint64_t offset, size_t bytes);
    // Those below are called with the lock; those that get it give it up while the system works.
    template <typename F>
    auto without(Lock& hold, F work);
    uint64_t take(Lock& hold, size_t bytes, bool& warm);
    uint64_t take_from(bool warm, size_t bytes);
    void put_back(uint64_t offset, size_t bytes, bool warm);
    void drop(Lock& hold, uint64_t offset);
    void reclaim(Lock& hold);
    bool is_held(uint64_t offset, const Piece& piece, size_t rank) const;
    size_t trim(Lock& hold);
    std::atomic<uint8_t>* holds(uint64_t offset) const {
        return reinterpret_cast<std::atomic<uint8_t>*>(base_ + offset);
    }

    MemoryFile file_;
    std::shared_ptr<Mapping> mapping_;
    std::byte* base_ = nullptr;
    size_t bytes_ = 0;
    const size_t page_;
    const int pid_;

    mutable std::mutex lock_;
    std::condition_variable settled_;                   // a thread has come back from the system
    int num_away_ = 0;                                  // threads that have given up the lock there
    std::map<uint64_t, Piece> used_;                    // by offset
    std::map<uint64_t, size_t> free_[2];                // cold, warm: bytes by offset
    std::set<std::pair<size_t, uint64_t>> by_size_[2];  // the same, by bytes
    std::vector<uint64_t> lent_;  // pieces that their owner has dropped and others may hold
    size_t kept_ = kKeptBytes, warm_bytes_ = 0, used_bytes_ = 0;
    std::atomic<int> num_retired_{0};
};

}  // namespace dure
