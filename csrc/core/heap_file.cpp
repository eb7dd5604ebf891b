// See the note "Heap file" in heap.h.
#include "heap_file.h"

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace dure {

namespace {

struct Range {
    char* begin = nullptr;
    size_t bytes = 0;
};

bool allocator_is_the_c_librarys() {
#ifdef __GLIBC__
    Dl_info allocator, library;
    void* const in_use = dlsym(RTLD_DEFAULT, "malloc");
    void* const libc = dlsym(RTLD_DEFAULT, "gnu_get_libc_version");
    return in_use != nullptr && libc != nullptr && dladdr(in_use, &allocator) != 0 &&
           dladdr(libc, &library) != 0 && allocator.dli_fbase == library.dli_fbase;
#else
    return false;
#endif
}

// The kernel's own list, where it may stand in pieces that touch (a fork's heap that has grown).
// What was moved before bears the file's name there.
Range heap() {
    Range found;
    std::FILE* maps = std::fopen("/proc/self/maps", "re");
    if (maps == nullptr) return found;
    char line[512];
    while (std::fgets(line, sizeof line, maps) != nullptr) {
        unsigned long begin = 0, end = 0;
        if (std::strstr(line, " rw-p ") == nullptr || std::strstr(line, " [heap]\n") == nullptr)
            continue;
        if (std::sscanf(line, "%lx-%lx", &begin, &end) != 2) continue;
        char* const first = reinterpret_cast<char*>(begin);
        if (found.bytes == 0) found.begin = first;
        if (found.begin + found.bytes != first) break;
        found.bytes += end - begin;
    }
    std::fclose(maps);
    return found;
}

// From the first byte written to the last page mapped nothing may change the heap. So all that the
// two functions below need is on the stack, and they call nothing but the kernel.
bool write_all(int fd, Range range) {
    for (size_t done = 0; done < range.bytes;) {
        const ssize_t wrote =
            pwrite(fd, range.begin + done, range.bytes - done, static_cast<off_t>(done));
        if (wrote <= 0) return false;
        done += static_cast<size_t>(wrote);
    }
    return true;
}

bool move(int fd, Range range) {
    if (!write_all(fd, range)) return false;
    return mmap(range.begin, range.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, 0) !=
           MAP_FAILED;
}

}  // namespace

int64_t move_heap(int fd) {
    if (!allocator_is_the_c_librarys()) return -ENOTSUP;
    const Range range = heap();
    if (range.bytes == 0) return -ENOENT;
    if (ftruncate(fd, static_cast<off_t>(range.bytes)) != 0) return -errno;
    sigset_t all, before;
    sigfillset(&all);  // for a handler might change the heap
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool moved = move(fd, range);
    const int error = errno;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return moved ? static_cast<int64_t>(range.bytes) : -error;
}

}  // namespace dure
