// What a forked child has of memory that processes share.
//
// Note "Forked children". A child has copies of its parent's private memory, but shares what is
// mapped from a memory file: the heap of its parent, and those of the parent's peers. A child of a
// rank is no rank, and should have copies of these too. Handlers of fork see to it:
//
// *What the child writes* stays in the child: it maps each heap again, privately, at its address.
// That costs some system calls per heap, whatever its size.
//
// *What the parent writes later* still shows in pages that the child has not written. So memory
// that is *copied in children* (CopiedInChildren: results of collectives, and what RPC has
// received) is copied before the fork, and the child gets the copy at the same address. The copy
// is made by the parent, since the parent may write, or free, the memory as soon as fork returns.
// At most kMostCopied bytes are copied, the smallest pieces first.
//
// All other memory of heaps is shared by design (shared_empty, parameters of FSDP): a child sees
// what its parent and other ranks write there.
//
// Where the system refuses a mapping the child shares that memory, as it would without handlers.
// A child of a child copies private memory, which needs none of this.
//
// Threads: any. The locks of the heap are held across fork, so that a child can use a heap of its
// own. Programs that are started without fork (posix_spawn, vfork) run no handlers.
#pragma once

#include <cstddef>

namespace dure {

constexpr size_t kMostCopied = size_t{256} << 20;

// Copies [data, data + bytes), which is in a heap, in forked children for as long as this lives.
class CopiedInChildren {
  public:
    CopiedInChildren(std::byte* data, size_t bytes);
    ~CopiedInChildren();
    CopiedInChildren(const CopiedInChildren&) = delete;
    CopiedInChildren& operator=(const CopiedInChildren&) = delete;

    // How many bytes there are that a fork now would not copy, since they are too many.
    static size_t not_copied();

  private:
    std::byte* const data_;
    const size_t bytes_;
};

// Install the handlers; once per process, before it has a heap.
void handle_forks();

}  // namespace dure
