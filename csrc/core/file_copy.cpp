// A read of what is in the kernel's page cache copies with plain stores, which first read the lines
// that they overwrite. So the file is mapped, and copied past the cache (see "Streaming" in
// copying.h), a piece at a time, which is summed while this core's cache has it: each byte comes
// out of memory once and goes into it once.
#include "file_copy.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "copying.h"
#include "crc32c.h"

namespace dure {

namespace {

constexpr size_t kPieceBytes = 256 * 1024;
constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, since Linux 5.14

}  // namespace

FileCopy copy_from_file(int fd, uint64_t at, std::byte* to, size_t bytes, bool summed) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t before = at % page, mapped_bytes = before + bytes;
    FileCopy done{0, 0};
    if (bytes == 0) return done;
    void* mapped =
        mmap(nullptr, mapped_bytes, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(at - before));
    if (mapped == MAP_FAILED) return done;
    madvise(mapped, mapped_bytes, MADV_SEQUENTIAL);
    auto* from = static_cast<std::byte*>(mapped);
    // Pieces end where pages do. What cannot be read is told by asking for it, before it is
    // touched.
    for (size_t begin = 0; begin < mapped_bytes; begin += kPieceBytes) {
        const size_t end = std::min(begin + kPieceBytes, mapped_bytes);
        if (madvise(from + begin, end - begin, kPopulateRead) != 0) break;
        const std::byte* piece = from + std::max(begin, before);
        const auto count = static_cast<size_t>(from + end - piece);
        stream_copy(to + done.bytes, piece, count);
        if (summed) done.sum = crc32c(piece, count, done.sum);
        done.bytes += count;
    }
    munmap(mapped, mapped_bytes);
    return done;
}

}  // namespace dure
