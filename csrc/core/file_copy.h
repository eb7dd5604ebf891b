// Bytes of a file, copied into memory and summed on the way.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dure {

struct FileCopy {
    size_t bytes;  // that were copied
    uint32_t sum;  // their CRC-32C, if it was asked for
};

// Copy `bytes` bytes of file `fd`, from byte `at` of it on, to `to`. Copies fewer, or none, where
// the file cannot be mapped, ends, or its disk fails: reading the rest tells which. A file that
// becomes shorter within the some 50 us that a piece takes ends the process by a signal (SIGBUS).
FileCopy copy_from_file(int fd, uint64_t at, std::byte* to, size_t bytes, bool summed);

}  // namespace dure
