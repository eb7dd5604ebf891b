// A heap that is moved into a memory file: the same bytes at the same addresses, before and after.
#include <malloc.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "harness.h"
#include "heap_file.h"

namespace dure {
namespace {

using namespace dure::testing;

constexpr size_t kBlocks = 4000, kBytes = 1000;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kForeignAllocator = true;
#else
constexpr bool kForeignAllocator = false;
#endif

using Blocks = std::vector<unsigned char*>;

Blocks filled_blocks() {
    Blocks blocks;
    for (size_t i = 0; i < kBlocks; i++) {
        blocks.push_back(static_cast<unsigned char*>(std::malloc(kBytes)));
        std::memset(blocks.back(), static_cast<int>(i % 251), kBytes);
    }
    return blocks;
}

bool untouched(const Blocks& blocks) {
    for (size_t i = 0; i < blocks.size(); i++) {
        for (size_t k = 0; k < kBytes; k++) {
            if (blocks[i][k] != i % 251) return false;
        }
    }
    return true;
}

// The line of the mapping in which `address` lies.
std::string mapping_of(const void* address) {
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        unsigned long begin = 0, end = 0;
        CHECK(std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) == 2);
        const auto at = reinterpret_cast<unsigned long>(address);
        if (begin <= at && at < end) return line;
    }
    return "";
}

// Run `body` in a process of its own; what it does to its heap stays there.
void apart(const std::function<void()>& body) {
    const pid_t pid = fork();
    if (pid == 0) {
        body();
        std::_Exit(0);
    }
    int status = -1;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(status == 0);
}

void move_it() {
    const int fd = memfd_create("dure-test-heap", MFD_CLOEXEC);
    CHECK(fd >= 0);
    CHECK(move_heap(fd) > static_cast<int64_t>(kBlocks * kBytes));
    close(fd);
}

TEST(moved_heap_keeps_its_bytes_and_addresses_and_goes_on) {
    if (kForeignAllocator) SKIP("the sanitizer has an allocator of its own");
    apart([] {
        const Blocks before = filled_blocks();
        CHECK(mapping_of(before[0]).find("[heap]") != std::string::npos);
        move_it();
        CHECK(mapping_of(before[0]).find("dure-test-heap") != std::string::npos);
        CHECK(untouched(before));
        for (unsigned char* block : before) std::free(block);
        CHECK(untouched(filled_blocks()));
        CHECK(untouched(filled_blocks()));
    });
}

TEST(memory_that_is_given_back_comes_again_as_zeros_where_zeros_are_asked_for) {
    if (kForeignAllocator) SKIP("the sanitizer has an allocator of its own");
    apart([] {
        Blocks blocks = filled_blocks();
        move_it();
        for (size_t i = 0; i < kBlocks; i++) {
            if (i % 100 != 0) std::free(blocks[i]);  // holes of many pages, and a top that stays
        }
        malloc_trim(0);
        for (size_t i = 0; i < kBlocks; i++) {
            const auto* zeros = static_cast<unsigned char*>(std::calloc(1, kBytes));
            for (size_t k = 0; k < kBytes; k++) CHECK(zeros[k] == 0);
        }
    });
}

TEST(what_a_fork_writes_is_its_own) {
    if (kForeignAllocator) SKIP("the sanitizer has an allocator of its own");
    apart([] {
        const Blocks blocks = filled_blocks();
        move_it();
        apart([&blocks] {
            CHECK(untouched(blocks));
            for (unsigned char* block : blocks) std::memset(block, 255, kBytes);
        });
        CHECK(untouched(blocks));
        for (unsigned char* block : blocks) std::memset(block, 254, kBytes);
        apart([&blocks] { CHECK(blocks[0][0] == 254); });
    });
}

TEST(heap_stays_where_the_file_cannot_be_written) {
    if (kForeignAllocator) SKIP("the sanitizer has an allocator of its own");
    apart([] {
        const Blocks blocks = filled_blocks();
        CHECK(move_heap(-1) == -EBADF);
        CHECK(mapping_of(blocks[0]).find("[heap]") != std::string::npos);
        CHECK(untouched(blocks));
    });
}

TEST(heap_of_another_allocator_is_left_alone) {
    if (kForeignAllocator) CHECK(move_heap(-1) == -ENOTSUP);
}

}  // namespace
}  // namespace dure
