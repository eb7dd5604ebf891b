// See the note "Processes" in process.h.
#include "process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <system_error>
#include <utility>

#include "symmetric_heap.h"

namespace dure {

namespace {

// The kernel's struct pidfd_info (Linux 6.13, exit code since 6.15), which Debian 12's headers do
// not have yet.
struct PidfdInfo {
    uint64_t mask;
    uint64_t cgroup;
    uint32_t ids[11];
    int32_t exit_code;
};
static_assert(sizeof(PidfdInfo) == 64);
constexpr unsigned long kPidfdGetInfo = _IOWR(0xFF, 11, PidfdInfo);
constexpr uint64_t kPidfdInfoExit = 1u << 3;

std::string describe(int status) {
    if (WIFEXITED(status)) return "exit code " + std::to_string(WEXITSTATUS(status));
    if (!WIFSIGNALED(status)) return "";
    std::string text = "signal " + std::to_string(WTERMSIG(status));
    if (const char* name = sigabbrev_np(WTERMSIG(status)))
        text.append(" (SIG").append(name).append(")");
    return text;
}

constexpr int kFateMs = 8;

// What /proc/PID/stat says of a process: its state, and its wait status, which is the last field
// but none; that is known from the moment a signal began to end it.
struct Stat {
    char state = 0;
    int status = 0;
};

Stat stat_of(int pid) {
    std::string path = "/proc/" + std::to_string(pid) + "/stat";
    int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return {};
    char text[1024];
    ssize_t n = ::read(fd, text, sizeof text - 1);
    ::close(fd);
    if (n <= 0) return {};
    text[n] = 0;
    const char* after_name = std::strrchr(text, ')');
    const char* last = std::strrchr(text, ' ');
    if (!after_name || after_name[1] == 0 || !last) return {};
    return {after_name[2], std::atoi(last + 1)};
}

// All that this process knows. Kept by those who use them; in a forked child the parent's are
// reached by what it has inherited, and are no longer found.
struct Known {
    std::mutex lock;
    int pid = 0;  // of the process that filled it
    std::map<std::pair<int, uint64_t>, std::weak_ptr<Process>> by_id;
};

Known& known() {
    static Known* all = new Known;  // outlives every static object that may use it
    return *all;
}

bool has_ended(int pid, uint64_t start_time) {
    const uint64_t started = start_time_of(pid);
    return started != start_time && (started != 0 || (kill(pid, 0) != 0 && errno == ESRCH));
}

// Whether a process whose descriptors cannot be opened is on its way out: they go before it ends.
bool is_ending(int pid, uint64_t start_time) {
    constexpr int kEndingMs = 1000;
    const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    if (pidfd < 0) return errno == ESRCH;
    pollfd end{pidfd, POLLIN, 0};
    const bool ended = poll(&end, 1, kEndingMs) == 1;
    ::close(pidfd);
    return ended || has_ended(pid, start_time);
}

bool is_heap_of(const Mapping& heap, int pid, uint64_t start_time) {
    const auto* page = reinterpret_cast<const ProcessPage*>(heap.data());
    return heap.bytes() >= sizeof(ProcessPage) && page->magic == SymmetricHeap::kMagic &&
           page->pid == pid && page->start_time == start_time;
}

// Null if the process has ended.
std::shared_ptr<Mapping> map_heap(int pid, uint64_t start_time, int heap_fd) {
    if (has_ended(pid, start_time)) return nullptr;
    try {
        std::shared_ptr<Mapping> heap = MemoryFile::open_of(pid, heap_fd).map();
        if (is_heap_of(*heap, pid, start_time)) return heap;
        throw std::system_error(
            ESTALE, std::generic_category(),
            "descriptor " + std::to_string(heap_fd) + " of process " + std::to_string(pid) +
                " is not its symmetric heap; it may be in another PID namespace (container)");
    } catch (const std::system_error&) {
        if (is_ending(pid, start_time)) return nullptr;
        throw;
    }
}

}  // namespace

std::shared_ptr<Process> Process::of(int pid, uint64_t start_time, int heap_fd) {
    Known& all = known();
    std::lock_guard hold(all.lock);
    if (all.pid != getpid()) {
        all.by_id.clear();
        all.pid = getpid();
    }
    std::weak_ptr<Process>& entry = all.by_id[{pid, start_time}];
    if (std::shared_ptr<Process> found = entry.lock()) return found;
    std::shared_ptr<Process> made;
    if (pid == getpid()) {
        made.reset(new Process(pid, -1, heap_fd, SymmetricHeap::of_process().mapping()));
    } else if (std::shared_ptr<Mapping> heap = map_heap(pid, start_time, heap_fd)) {
        // Opened last: a program that is short of descriptors can still map the heap.
        const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
        if (pidfd >= 0 || errno != ESRCH)
            made.reset(new Process(pid, pidfd, heap_fd, std::move(heap)));
        if (made && has_ended(pid, start_time)) made.reset();
    }
    if (made)
        entry = made;
    else
        all.by_id.erase({pid, start_time});
    std::erase_if(all.by_id, [](const auto& e) { return e.second.expired(); });
    return made;
}

std::mutex& Process::lock() { return known().lock; }

std::vector<std::shared_ptr<Process>> Process::all_known_to(int pid) {
    std::vector<std::shared_ptr<Process>> all;
    if (known().pid != pid) return all;
    for (const auto& [id, entry] : known().by_id) {
        if (std::shared_ptr<Process> process = entry.lock()) all.push_back(std::move(process));
    }
    return all;
}

// The number of a process that has ended may be another's by now: so the file is looked at first.
bool Process::map_privately() const {
    try {
        const MemoryFile file = MemoryFile::open_of(pid_, heap_fd_);
        const std::shared_ptr<Mapping> found = file.map();
        return found->bytes() == heap_bytes() && is_heap_of(*found, pid_, page().start_time) &&
               file.map_privately(heap(), heap_bytes(), 0);
    } catch (const std::system_error&) {
        return false;
    }
}

Process::~Process() {
    if (pidfd_ >= 0) ::close(pidfd_);
}

bool Process::dead() const {
    if (self_) return false;
    if ((page().life.load(std::memory_order_acquire) & FUTEX_OWNER_DIED) != 0) return true;
    pollfd p{pidfd_, POLLIN, 0};
    return p.fd >= 0 && poll(&p, 1, 0) == 1 && (p.revents & (POLLIN | POLLHUP)) != 0;
}

std::string Process::fate() const {
    if (pidfd_ < 0) return "";
    const Stat now = stat_of(pid_);
    const bool stopped = now.state == 'T' || now.state == 't';
    if (now.status != 0 && !stopped) return describe(now.status);
    pollfd end{pidfd_, POLLIN, 0};
    if (poll(&end, 1, kFateMs) != 1) return "";
    PidfdInfo info{};
    info.mask = kPidfdInfoExit;
    if (ioctl(pidfd_, kPidfdGetInfo, &info) == 0 && (info.mask & kPidfdInfoExit)) {
        return describe(info.exit_code);
    }
    const Stat then = stat_of(pid_);
    return then.state == 'Z' ? describe(then.status) : "";
}

char Process::activity() const { return pidfd_ < 0 ? 0 : stat_of(pid_).state; }

uint32_t Process::ask(uint64_t about) const {
    ProcessPage& mine = page();
    mine.about.store(about, std::memory_order_seq_cst);
    const uint32_t question = mine.asked.fetch_add(1, std::memory_order_seq_cst) + 1;
    futex_wake_all(mine.asked);
    return question;
}

std::string Process::await_answer(uint32_t question, int64_t deadline_ns) const {
    ProcessPage& mine = page();
    for (;;) {
        const uint32_t seen = mine.answered.load(std::memory_order_seq_cst);
        if (seen != 0 && static_cast<int32_t>(seen - question) >= 0) {
            char bytes[kAnswerBytes];
            for (size_t i = 0; i < kAnswerBytes / 8; i++) {
                uint64_t part = mine.answer[i].load(std::memory_order_seq_cst);
                std::memcpy(bytes + 8 * i, &part, 8);
            }
            if (mine.answered.load(std::memory_order_seq_cst) == seen)
                return {bytes, strnlen(bytes, sizeof bytes)};
            continue;
        }
        const int64_t left = deadline_ns - now_ns();
        if (left <= 0) return "";
        futex_wait(mine.answered, seen, left);
    }
}

}  // namespace dure
