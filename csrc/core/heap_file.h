// The heap of this process, moved into a memory file that its forks map page by page.
//
// Note "Heap file". A fork copies the page tables of anonymous memory: each child maps every page
// of its parent, whether it will touch it or not, and its resident size counts them all. A private
// mapping of a file is left out: a child maps a page when it first touches it, and gets a copy of
// its own when it first writes to it. So a process whose heap is large, and whose forks touch
// little of it, writes the heap into a file and maps that in its place. The addresses and what lies
// there stay. From then on forks are quicker, for they have less to copy, and smaller, for they map
// what they use; whoever reads the whole heap pays a page fault for each 16 pages of it.
//
// Only what the kernel calls [heap] is moved: the memory below the break, where the C library
// puts all but the largest blocks. It takes no page there for zero that is not new, so it does not
// matter that a page given back (MADV_DONTNEED) returns with what the file has, where it would be
// zero otherwise. No other allocator is known to keep to that, and its heap is left as it is.
#pragma once

#include <cstdint>

namespace dure {

// Write the heap into memory file `fd`, which becomes as long as the heap, and map it in its place.
// Returns the number of bytes, or -errno with nothing changed: -ENOTSUP where the allocator is not
// the C library's, -ENOENT where there is no heap, or why the file cannot be written or mapped.
// The process must have one thread. Cost: 0.6 us a page, and 1 us more where the file has no memory
// yet (posix_fallocate).
int64_t move_heap(int fd);

}  // namespace dure
