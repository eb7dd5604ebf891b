// One memory file mapped by all ranks of a group, without a name that could leak.
//
// Note "Segment". Group rank 0 makes an anonymous file (memfd, mode 0600) and tells its peers, over
// the store, "pid:fd:nonce". A peer opens /proc/PID/fd/FD, which the kernel allows to the same user
// in the same PID namespace, and checks the nonce in the header, so that a reused descriptor number
// cannot be taken for the segment. When all have mapped it, rank 0 closes the descriptor; from then
// on the memory lives exactly as long as some process has it mapped. The file is sealed against
// shrinking and growing, so that no peer can turn another's access into SIGBUS.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "types.h"

namespace dure {

// A mapping; unmapped when the last reference goes.
class Mapping {
  public:
    Mapping(std::byte* data, size_t bytes) : data_(data), bytes_(bytes) {}
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    std::byte* data() const { return data_; }
    size_t bytes() const { return bytes_; }

  private:
    std::byte* data_;
    size_t bytes_;
};

// An open memory file; closed by the destructor.
class MemoryFile {
  public:
    MemoryFile() = default;
    ~MemoryFile() { close(); }
    MemoryFile(MemoryFile&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
    MemoryFile& operator=(MemoryFile&& other) noexcept;

    // Make a sealed file of `bytes`; throws std::system_error, whose text names the limit of this
    // process that forbids it.
    static MemoryFile create(const char* label, size_t bytes);
    // Open the file that process `pid` holds as `fd`; throws std::system_error.
    static MemoryFile open_of(int pid, int fd);

    // Map all of it; throws std::system_error, as `create` does.
    std::shared_ptr<Mapping> map() const;
    // Map `bytes` from `offset` on in the place of what is mapped at `at`, so that what this
    // process writes stays in it. False: the system refused, and nothing has changed.
    bool map_privately(std::byte* at, size_t bytes, uint64_t offset) const;
    int fd() const { return fd_; }
    void close();

  private:
    int fd_ = -1;
};

// The limit on a resource (getrlimit); SIZE_MAX where there is none.
size_t limit_on(int resource);

// Clock ticks from boot to the start of process `pid`; 0 if there is none. Tells a process from
// a later one with the same number.
uint64_t start_time_of(int pid);

}  // namespace dure
