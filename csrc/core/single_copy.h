// One copy, by the kernel, between the private memory of two processes.
//
// Note "Single copies". Staging moves every byte twice, through lines that both cores write in
// turn. The kernel can move it once: process_vm_readv reads a peer's memory into ours. It costs a
// system call and, for every page, looking up where the peer has it. Which way is
// quicker is learnt (message_ways.h, block_ways.h).
//
// No rank writes into a peer's private memory. A rank that was kept from its core could do so after
// the peer's call has failed and its memory has another use.
//
// Permission. The kernel asks as for ptrace(2): the same user, a process that may be looked into
// (PR_SET_DUMPABLE), and no seccomp filter against it. Where Yama restricts ptrace to descendants,
// a process can name one more that may, with all its descendants (PR_SET_PTRACER): `admit_peers`
// names the nearest ancestor that all ranks of the host have in common, never "any", nor init,
// whose descendants are everybody. Whether it is permitted is tried out, by reading a word of every
// peer; where any rank may not, none does.
//
// A process that ends is no peer: its number may soon be another's. So a rank that has copied looks
// afterwards whether the peer is still alive (Group::lost), and only then trusts what it read. It
// looks before it tells the peer that it has copied, since after that the peer may end well.
//
// In one's own process (ranks as threads) a copy is a memcpy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dure {

// A place in the private memory of a process.
struct Remote {
    int pid = 0;
    uint64_t address = 0;
};

// Copy `bytes`; false where the kernel refuses, or the memory is not there. Some may have been
// copied then. A copy that the kernel ends early is gone on with.
bool read_from(Remote from, void* to, size_t bytes);

// Let the processes `pids`, ours among them, copy from our memory, where that takes a word;
// those of earlier calls still may.
void admit_peers(const std::vector<int>& pids);

// The nearest process that has all `pids` among its descendants or is one of them; 0 if there is
// none but init, or it cannot be known.
int common_ancestor(const std::vector<int>& pids);

}  // namespace dure
