// A test harness of one header: cases, checks, and ranks as threads or as forked processes.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "group.h"

namespace dure::testing {

struct Case {
    const char* name;
    void (*body)();
};

inline std::vector<Case>& cases() {
    static std::vector<Case> all;
    return all;
}

inline int add_case(const char* name, void (*body)()) {
    cases().push_back({name, body});
    return 0;
}

#define TEST(name)                                                          \
    static void name();                                                     \
    static const int name##_added = ::dure::testing::add_case(#name, name); \
    static void name()

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
            std::_Exit(1);                                                                     \
        }                                                                                      \
    } while (false)

// Ends a case that needs what this machine lacks; said aloud, and counted (scripts/native-test).
#define SKIP(reason)                            \
    do {                                        \
        std::printf("  skipped: %s\n", reason); \
        return;                                 \
    } while (false)

constexpr uint64_t kNonce = 42;

// How the groups of the tests copy: see copy_plan.h.
inline int64_t single_copies = kLearnCopies;
// How many cores they believe they have.
inline int cores = static_cast<int>(std::thread::hardware_concurrency());

// Whether their ranks may move between cores (cores.cpp).
inline bool migrates = false;

inline Options options_of(int rank, int size, double timeout_s = 20) {
    return {rank, size, static_cast<int64_t>(timeout_s * 1e9), cores, single_copies, migrates};
}

using Body = std::function<void(Group&)>;

// Run `body` on `n` ranks that are threads of this process and share one mapping.
// `prepare` runs on each before it is ready.
inline void on_threads(
    int n, const Body& body, double timeout_s = 20, const Body& prepare = [](Group&) {}) {
    std::vector<std::unique_ptr<Group>> groups;
    groups.push_back(Group::create(options_of(0, n, timeout_s), kNonce));
    for (int r = 1; r < n; r++)
        groups.push_back(Group::join(options_of(r, n, timeout_s), *groups[0]));
    std::vector<std::thread> threads;
    for (auto& group : groups) {
        threads.emplace_back([&body, &prepare, &group] {
            prepare(*group);
            group->ready();
            body(*group);
        });
    }
    for (std::thread& t : threads) t.join();
}

// Run `body` on `n` forked ranks, each with a mapping of its own. Returns their wait statuses.
inline std::vector<int> on_processes(
    int n, const Body& body, double timeout_s = 20, const Body& prepare = [](Group&) {}) {
    std::unique_ptr<Group> first = Group::create(options_of(0, n, timeout_s), kNonce);
    const int parent = getpid(), fd = first->file();
    std::vector<pid_t> children;
    for (int r = 1; r < n; r++) {
        pid_t pid = fork();
        if (pid == 0) {
            auto group = Group::attach(options_of(r, n, timeout_s), parent, fd, kNonce);
            while (group->attached() < n) group->wait_attached(1'000'000);
            prepare(*group);
            group->ready();
            body(*group);
            std::_Exit(0);
        }
        children.push_back(pid);
    }
    while (first->attached() < n) first->wait_attached(1'000'000);
    prepare(*first);
    first->ready();
    body(*first);
    std::vector<int> statuses{0};
    for (pid_t pid : children) {
        int status = 0;
        waitpid(pid, &status, 0);
        statuses.push_back(status);
    }
    return statuses;
}

// Run `body` in a process of its own, whose end changes nothing here.
inline void in_child(const std::function<void()>& body) {
    const pid_t pid = fork();
    if (pid == 0) {
        body();
        std::_Exit(0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// As a container's seccomp filter does: this thread, and those it starts, may not copy from other
// processes from now on.
inline void forbid_single_copies() {
    sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog filter{std::size(code), code};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0);
}

template <typename T>
Block block_of(std::vector<T>& v) {
    return {reinterpret_cast<std::byte*>(v.data()), v.size() * sizeof(T)};
}

}  // namespace dure::testing

// Run the cases whose names begin with an argument; all without arguments.
int main(int argc, char** argv) {
    for (const auto& test : dure::testing::cases()) {
        bool wanted = argc < 2;
        for (int i = 1; i < argc; i++) wanted |= std::string(test.name).starts_with(argv[i]);
        if (!wanted) continue;
        std::printf("%s\n", test.name);
        std::fflush(stdout);
        test.body();
    }
}
