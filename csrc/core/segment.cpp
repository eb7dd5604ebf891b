#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>

namespace dure {

namespace {

[[noreturn]] void fail(const std::string& what) {
    throw std::system_error(errno, std::generic_category(), what);
}

std::string told_limit(int resource, const char* name) {
    const size_t limit = limit_on(resource);
    if (limit == SIZE_MAX) return "";
    return std::string(" under ") + name + " = " + std::to_string(limit) + " bytes";
}

// A system can demand that no memory file can be executed (vm.memfd_noexec); the flag for it is
// unknown before Linux 6.3.
int create_file(const char* label) {
    constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING, kNoExecSeal = 8;
    const int fd = memfd_create(label, kFlags | kNoExecSeal);
    return fd >= 0 || errno != EINVAL ? fd : memfd_create(label, kFlags);
}

}  // namespace

size_t limit_on(int resource) {
    rlimit limit{};
    if (getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0) return SIZE_MAX;
    return limit.rlim_cur == RLIM_INFINITY ? SIZE_MAX : static_cast<size_t>(limit.rlim_cur);
}

Mapping::~Mapping() { munmap(data_, bytes_); }

MemoryFile& MemoryFile::operator=(MemoryFile&& other) noexcept {
    if (this != &other) {
        close();
        fd_ = other.fd_;
        other.fd_ = -1;
    }
    return *this;
}

MemoryFile MemoryFile::create(const char* label, size_t bytes) {
    MemoryFile file;
    file.fd_ = create_file(label);
    if (file.fd_ < 0) fail("memfd_create");
    if (fchmod(file.fd_, 0600) != 0) fail("fchmod of a memory file");
    // Exceeding the file size limit would raise SIGXFSZ.
    const bool fits = bytes <= limit_on(RLIMIT_FSIZE);
    if (!fits) errno = EFBIG;
    if (!fits || ftruncate(file.fd_, static_cast<off_t>(bytes)) != 0) {
        fail("a memory file of " + std::to_string(bytes) + " bytes" +
             told_limit(RLIMIT_FSIZE, "RLIMIT_FSIZE (ulimit -f)"));
    }
    if (fcntl(file.fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        fail("sealing a memory file");
    }
    return file;
}

MemoryFile MemoryFile::open_of(int pid, int fd) {
    std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    MemoryFile file;
    file.fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file.fd_ < 0) fail("open " + path);
    if (fcntl(file.fd_, F_GET_SEALS) < 0) fail(path + " is not a memory file");
    return file;
}

std::shared_ptr<Mapping> MemoryFile::map() const {
    struct stat info;
    if (fstat(fd_, &info) != 0) fail("fstat of a memory file");
    auto bytes = static_cast<size_t>(info.st_size);
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (at == MAP_FAILED) {
        fail("mmap of " + std::to_string(bytes) + " bytes" +
             told_limit(RLIMIT_AS, "RLIMIT_AS (ulimit -v)"));
    }
    return std::make_shared<Mapping>(static_cast<std::byte*>(at), bytes);
}

// Older systems remove what was mapped before they find out that they refuse, so the mapping is
// made elsewhere first.
bool MemoryFile::map_privately(std::byte* at, size_t bytes, uint64_t offset) const {
    constexpr int kFlags = MAP_PRIVATE | MAP_NORESERVE, kAccess = PROT_READ | PROT_WRITE;
    const auto from = static_cast<off_t>(offset);
    void* rehearsal = mmap(nullptr, bytes, kAccess, kFlags, fd_, from);
    if (rehearsal == MAP_FAILED) return false;
    munmap(rehearsal, bytes);
    if (mmap(at, bytes, kAccess, kFlags | MAP_FIXED, fd_, from) == MAP_FAILED) return false;
    madvise(at, bytes, MADV_DONTDUMP);
    return true;
}

void MemoryFile::close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
}

uint64_t start_time_of(int pid) {
    std::string path = "/proc/" + std::to_string(pid) + "/stat";
    int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    char text[1024];
    ssize_t n = ::read(fd, text, sizeof text - 1);
    ::close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    // Field 2 is the name in parentheses and may hold anything; field 22 is what we want.
    const char* p = std::strrchr(text, ')');
    for (int field = 2; p && field < 22; field++) p = std::strchr(p + 1, ' ');
    return p ? std::strtoull(p + 1, nullptr, 10) : 0;
}

}  // namespace dure
