#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
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

}  // namespace

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
    file.fd_ = memfd_create(label, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file.fd_ < 0) fail("memfd_create");
    if (fchmod(file.fd_, 0600) != 0) fail("fchmod of a memory file");
    if (ftruncate(file.fd_, static_cast<off_t>(bytes)) != 0) {
        fail("ftruncate of a memory file to " + std::to_string(bytes) + " bytes");
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
    if (at == MAP_FAILED) fail("mmap of " + std::to_string(bytes) + " bytes");
    return std::make_shared<Mapping>(static_cast<std::byte*>(at), bytes);
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
