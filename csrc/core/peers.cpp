#include "peers.h"

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

#include "segment.h"

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

}  // namespace

bool Peers::add(int pid, unsigned long long start_time, bool self) {
    int fd = -1;
    bool gone = false;
    if (!self) {
        fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
        gone = fd < 0 && errno == ESRCH;
        const unsigned long long started = fd < 0 ? 0 : start_time_of(pid);  // 0: cannot be known
        if (started != 0 && started != start_time) {
            ::close(fd);
            fd = -1;
            gone = true;
        }
    }
    peers_.push_back({pid, fd});
    return !gone;
}

bool Peers::dead(int rank) const {
    if (rank < 0 || static_cast<size_t>(rank) >= peers_.size()) return false;
    pollfd p{peers_[static_cast<size_t>(rank)].fd, POLLIN, 0};
    return p.fd >= 0 && poll(&p, 1, 0) == 1 && (p.revents & (POLLIN | POLLHUP)) != 0;
}

std::string Peers::fate(int rank) const {
    if (rank < 0 || static_cast<size_t>(rank) >= peers_.size()) return "";
    const Peer& peer = peers_[static_cast<size_t>(rank)];
    if (peer.fd < 0) return "";
    const Stat now = stat_of(peer.pid);
    const bool stopped = now.state == 'T' || now.state == 't';
    if (now.status != 0 && !stopped) return describe(now.status);
    pollfd end{peer.fd, POLLIN, 0};
    if (poll(&end, 1, kFateMs) != 1) return "";
    PidfdInfo info{};
    info.mask = kPidfdInfoExit;
    if (ioctl(peer.fd, kPidfdGetInfo, &info) == 0 && (info.mask & kPidfdInfoExit)) {
        return describe(info.exit_code);
    }
    const Stat then = stat_of(peer.pid);
    return then.state == 'Z' ? describe(then.status) : "";
}

char Peers::activity(int rank) const {
    if (rank < 0 || static_cast<size_t>(rank) >= peers_.size()) return 0;
    const Peer& peer = peers_[static_cast<size_t>(rank)];
    return peer.fd < 0 ? 0 : stat_of(peer.pid).state;
}

void Peers::close() {
    for (Peer& peer : peers_) {
        if (peer.fd >= 0) ::close(peer.fd);
    }
    peers_.clear();
}

}  // namespace dure
