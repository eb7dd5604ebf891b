#include "peers.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

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

// The wait status of a zombie, from the last field but none of /proc/PID/stat; -1 if unknown.
int zombie_status(int pid) {
    std::string path = "/proc/" + std::to_string(pid) + "/stat";
    int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    char text[1024];
    ssize_t n = ::read(fd, text, sizeof text - 1);
    ::close(fd);
    if (n <= 0) return -1;
    text[n] = 0;
    const char* after_name = std::strrchr(text, ')');
    if (!after_name || after_name[1] == 0 || after_name[2] != 'Z') return -1;
    const char* last = std::strrchr(text, ' ');
    return last ? std::atoi(last + 1) : -1;
}

}  // namespace

bool Peers::add(int pid, unsigned long long start_time, bool self) {
    int fd = -1;
    if (!self) {
        fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
        if (fd >= 0 && start_time_of(pid) != start_time) {
            ::close(fd);
            fd = -1;
        }
    }
    peers_.push_back({pid, fd});
    return self || fd >= 0;
}

bool Peers::dead(int rank) const {
    if (rank < 0 || static_cast<size_t>(rank) >= peers_.size()) return false;
    pollfd p{peers_[static_cast<size_t>(rank)].fd, POLLIN, 0};
    return p.fd >= 0 && poll(&p, 1, 0) == 1 && (p.revents & (POLLIN | POLLHUP)) != 0;
}

std::string Peers::fate(int rank) const {
    if (rank < 0 || static_cast<size_t>(rank) >= peers_.size()) return "";
    const Peer& peer = peers_[static_cast<size_t>(rank)];
    PidfdInfo info{};
    info.mask = kPidfdInfoExit;
    if (peer.fd >= 0 && ioctl(peer.fd, kPidfdGetInfo, &info) == 0 && (info.mask & kPidfdInfoExit)) {
        return describe(info.exit_code);
    }
    int status = zombie_status(peer.pid);
    return status < 0 ? "" : describe(status);
}

void Peers::close() {
    for (Peer& peer : peers_) {
        if (peer.fd >= 0) ::close(peer.fd);
    }
    peers_.clear();
}

}  // namespace dure
