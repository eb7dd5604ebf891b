"""What this machine shows: reads the values that `checks` judges, changing nothing."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

import psutil

import dure
from dure import env
from dure.cli.doctor import checks
from dure.cli.doctor.checks import Findings, Gpu, Interface, Orphan
from dure.cli.machine import commit, usable_cores
from dure.launch.ranks.limits import available_memory
from dure.store.key import user_key_path
from dure.store.system import control_groups, cpu_quota, kernel_text, memory_file

_USUAL_PORT = 29500
# As `store.system.memory_file`, which an interpreter without site-packages does not find.
_CHILD = """
import os, sys
try:
    fd = os.memfd_create("dure-doctor", os.MFD_CLOEXEC | 8)
except OSError:
    fd = os.memfd_create("dure-doctor", os.MFD_CLOEXEC)
os.write(fd, b"seen")
print(fd, flush=True)
sys.stdin.read()
"""


def packages() -> dict[str, str]:
    """Return the versions of what is installed, without importing it."""
    found = {"dure": dure.__version__}
    for name in ("torch", "pyzmq", "msgspec", "psutil", "mpi4py", "ClusterShell"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _versions() -> Findings:
    yield from checks.versions(platform.python_version(), packages())
    yield from checks.checkout(dure.__version__, commit())
    yield from checks.system(platform.system(), platform.release(), platform.machine())


def _cores() -> Findings:
    governor = kernel_text(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"))
    load = os.getloadavg()[0]
    return checks.cores(os.cpu_count() or 1, usable_cores(), cpu_quota(), load, governor)


def _memory() -> Findings:
    now, swapped = psutil.virtual_memory(), psutil.swap_memory().used
    yield from checks.memory(now.total, now.available, swapped, available_memory())
    folder = Path("/sys/kernel/mm/transparent_hugepage")
    settings = [kernel_text(folder / name) for name in ("enabled", "shmem_enabled")]
    # as in `always [madvise] never`
    yield from checks.huge_pages(*(x.partition("[")[2].partition("]")[0] for x in settings))


def _sharing() -> Findings:
    """Try what the engine of one host stands on, the peer's memory with a child of this process.

    Dure's segments are anonymous (memfd): a peer opens them through `/proc/PID/fd`, which a
    container, `hidepid` or a seccomp filter may forbid.
    """
    total = free = 0
    with contextlib.suppress(OSError):
        total, _, free = shutil.disk_usage("/dev/shm")
    yield from checks.shm(total, free, os.access("/dev/shm", os.W_OK))
    memfd = _error_of(lambda: os.close(memory_file("dure-doctor")))
    pidfd = _error_of(lambda: os.close(os.pidfd_open(os.getpid())))
    yield from checks.engine(memfd, "" if memfd else _error_of(_open_peer), pidfd)
    scope = kernel_text(Path("/proc/sys/kernel/yama/ptrace_scope"))
    marks = {"/.dockerenv": "docker", "/run/.containerenv": "podman", "/singularity": "singularity"}
    container = next((name for path, name in marks.items() if os.path.exists(path)), "")
    filtered = "Seccomp:\t2" in kernel_text(Path("/proc/self/status"))
    yield from checks.ptrace(int(scope or 0), container, filtered)


def _error_of(action: Callable[[], object]) -> str:
    """Return why `action` failed, or nothing."""
    try:
        action()
    except OSError as error:
        return f"{error.strerror or error}"
    return ""


def _open_peer() -> None:
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        number = int(child.stdout.readline() or -1)
        if Path(f"/proc/{child.pid}/fd/{number}").read_bytes() != b"seen":
            raise OSError(0, "another content was read than was written")
    finally:
        child.kill()
        child.communicate()


def _limits() -> Findings:
    names = (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
    soft = [resource.getrlimit(name)[0] for name in names]
    locked, files, mine = (float("inf") if n == resource.RLIM_INFINITY else n for n in soft)
    yield from checks.locked_memory(locked, Path("/sys/class/infiniband").is_dir())
    yield from checks.files(files)
    groups = [kernel_text(group / "pids.max") for group in control_groups(Path("/"), "pids")]
    least = min(mine, *(int(n) for n in groups if n.isdigit()), float("inf"))
    yield from checks.processes(least, len(psutil.pids()))
    folder = tempfile.gettempdir()
    yield from checks.temporary_files(shutil.disk_usage(folder).free, folder)


def _names() -> Findings:
    known = list(_interfaces())
    routes = [row.split() for row in kernel_text(Path("/proc/net/route")).splitlines()[1:]]
    default = next((row[0] for row in routes if row[1:2] == ["00000000"]), "")
    chosen = _set_variables(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"))
    yield from checks.interfaces(known, default, chosen)
    hostname, start = socket.gethostname(), time.monotonic()
    resolved: list[str] = []
    with contextlib.suppress(OSError):
        resolved = socket.gethostbyname_ex(hostname)[2]
    own_s = time.monotonic() - start
    yield from checks.own_name(hostname, resolved, known)
    addresses = [a for i in known if i.is_real or i.name == "lo" for a in i.addresses]
    yield from checks.look_ups(own_s, max(map(_reverse_s, addresses[:2]), default=0.0))


def _interfaces() -> Iterable[Interface]:
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        own = tuple(a.address for a in addresses if a.family == socket.AF_INET)
        if name in states and states[name].isup and own:
            yield Interface(name, own, states[name].speed)


def _reverse_s(address: str) -> float:
    start = time.monotonic()
    socket.getnameinfo((address, 0), 0)
    return time.monotonic() - start


def _ports() -> Findings:
    numbers = kernel_text(Path("/proc/sys/net/ipv4/ip_local_port_range")).split()
    first, last = (int(number) for number in numbers)
    used: set[int] = set()
    holder = "somebody" if _error_of(_bind_usual_port) else ""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            port = connection.laddr.port if connection.laddr else 0
            if first <= port <= last:
                used.add(port)
            if port == _USUAL_PORT and connection.status == psutil.CONN_LISTEN:
                pid = connection.pid
                holder = f"{psutil.Process(pid).name()} (pid {pid})" if pid else "another user"
    yield from checks.ports(first, last, len(used), holder, _error_of(_connect_to_self))


def _bind_usual_port() -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", _USUAL_PORT))


def _connect_to_self() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=2.0).close()


def _clock() -> Findings:
    timex = ctypes.create_string_buffer(512)  # struct timex, whose `modes` of 0 changes nothing
    state = ctypes.CDLL(None).adjtimex(timex)
    source = kernel_text(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource"))
    start, readings = time.perf_counter_ns(), 2000
    for _ in range(readings):
        time.monotonic_ns()
    read_ns = (time.perf_counter_ns() - start) / readings
    return checks.clock(state != 5, source or "unknown", read_ns)  # 5: TIME_ERROR


def _keys() -> Findings:
    named = env.text("DURE_JOB_KEY_FILE")
    for path in [user_key_path(), *([Path(named)] if named else [])]:
        file, folder_mode = None, 0
        with contextlib.suppress(OSError):
            file, folder_mode = path.stat(), path.parent.stat().st_mode
        yield from checks.key_file(path, file, folder_mode, os.getuid(), named=str(path) == named)


def _environment() -> Findings:
    variables = _set_variables((*checks.RANK_VARIABLES, "DURE_LAUNCHER", "OMP_NUM_THREADS"))
    return checks.environment(
        variables, usable_cores(), insecure=env.flag("DURE_INSECURE"), unknown=env.unknown_note()
    )


def _set_variables(names: Iterable[str]) -> dict[str, str]:
    found = {name: env.text(name) for name in names}
    return {name: value for name, value in found.items() if value}


def _leftovers() -> Findings:
    """Look through this user's processes for those with a job in their environment."""
    jobs: dict[int, str] = {}
    members: list[psutil.Process] = []
    attributes = ["environ", "uids", "ppid", "name", "create_time"]
    for process in psutil.process_iter(attributes):
        environ, uids = process.info["environ"], process.info["uids"]
        if environ and "DURE_LAUNCHER" in environ and uids and uids.real == os.getuid():
            jobs[process.pid] = environ["DURE_LAUNCHER"]
            members.append(process)
    left = [
        Orphan(p.pid, p.info["name"], time.time() - p.info["create_time"])
        for p in members
        if p.info["ppid"] == 1 and jobs.get(1) != jobs[p.pid]
    ]
    return checks.leftovers(len(set(jobs.values())), left)


def nvidia_cards() -> tuple[list[Gpu], str]:
    """Return the cards that nvidia-smi shows, and why it failed where it is installed."""
    if shutil.which("nvidia-smi") is None:
        return [], ""
    query = "--query-gpu=index,name,driver_version,memory.total,memory.used,compute_mode"
    words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=5.0, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    if done.returncode != 0:
        return [], (done.stdout + done.stderr).strip()
    cards: list[Gpu] = []
    for row in csv.reader(done.stdout.splitlines(), skipinitialspace=True):
        number, name, driver, total, used, mode = row
        megabytes = [int(text) if text.isdigit() else 0 for text in (total, used)]
        cards.append(Gpu(number, name, driver, *megabytes, mode=mode))
    return cards, ""


CHECKS: dict[str, Callable[[], Findings]] = {
    "versions": _versions,
    "cores": _cores,
    "memory": _memory,
    "sharing": _sharing,
    "limits": _limits,
    "names": _names,
    "ports": _ports,
    "clock": _clock,
    "keys": _keys,
    "environment": _environment,
    "leftovers": _leftovers,
}
