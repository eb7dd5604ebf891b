"""The checks of `dure doctor`: each reads something of this machine, and judges it.

A check changes nothing, and yields what it found. `ranks` has the checks that start processes.
"""

from __future__ import annotations

import contextlib
import csv
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple  # Any: what a rank reports as JSON

import psutil

import dure
from dure import env
from dure.cli.machine import commit, usable_cores
from dure.cli.version import checkout_note
from dure.errors import DureError
from dure.launch.ranks.limits import available_memory
from dure.store.key import key_from_file, user_key_path
from dure.store.system import control_groups, cpu_quota, kernel_text, memory_file
from dure.trace.logs import size_text

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OLDEST_KERNEL = (5, 6)  # pidfd_getfd; pidfd_open and memfd are older
_RANK_BYTES = 300 << 20  # a rank that has imported torch
_VIRTUAL = ("lo", "docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "tun", "tap", "wg")
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


class Level(Enum):
    OK = "ok"
    NOTE = "note"
    """Matters for some jobs only, such as those on several hosts."""
    WARNING = "warning"
    """Works, but worse than it could."""
    PROBLEM = "problem"
    """A job will fail here, or hang."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found; `advice` is empty if there is nothing to do."""

    level: Level
    check: str
    seen: str
    advice: str = ""


Findings = Iterator[Finding]
fine = partial(Finding, Level.OK)
note = partial(Finding, Level.NOTE)
warning = partial(Finding, Level.WARNING)
problem = partial(Finding, Level.PROBLEM)


def versions() -> Findings:
    """Python, packages, the kernel, and whether the checkout is the installed commit."""
    found = {"dure": dure.__version__}
    for name in ("torch", "pyzmq", "msgspec", "psutil", "mpi4py", "ClusterShell"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    shown = ", ".join(f"{name} {number}" for name, number in found.items())
    yield fine("versions", f"Python {platform.python_version()}, {shown}")
    torch = found.get("torch")
    if torch is None:
        yield problem("torch", "not installed", "pip install torch")
    elif _numbers(torch) < (2, 11):
        yield problem("torch", f"{torch} is older than 2.11", "pip install --upgrade torch")
    elif _numbers(torch) >= (2, 14):
        seen = f"{torch} is newer than 2.13, the newest that the tests have passed with"
        yield warning("torch", seen, "pip install 'torch<2.14'")
    if text := checkout_note(dure.__version__, commit()):
        yield note("checkout", text, "Install it again: `make setup`, or `pip install -e .`.")
    text = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() != "Linux":
        seen = f"{text}: no shared-memory engine, no `dure run`"
        yield warning("system", seen, "backend='gloo' works.")
    elif _numbers(platform.release()) < _OLDEST_KERNEL:
        yield warning("system", f"{text}: older than 5.6", "A newer kernel; or backend='gloo'.")
    else:
        yield fine("system", text)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, as in (2, 13, 0) of 2.13.0+cpu."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def cores() -> Findings:
    """The cores this process may use, and other load on them."""
    total, usable, quota = os.cpu_count() or 1, usable_cores(), cpu_quota()
    text = f"{usable} of {total} hardware threads usable"
    if usable < total:
        yield warning(
            "cores",
            f"{text}: this process is bound to some",
            f"Start at most {usable} ranks, or free it (taskset, srun --cpus-per-task, "
            "docker --cpuset-cpus).",
        )
    else:
        yield fine("cores", text)
    if quota < usable - 0.01:
        yield warning(
            "cores",
            f"the container may use {quota:.3g} cores' time, though it sees {usable}: ranks "
            "beyond that are stopped again and again",
            f"Start at most {max(1, int(quota))} ranks, or raise the limit (docker --cpus, "
            "resources.limits.cpu).",
        )
    load, limit = os.getloadavg()[0], min(usable, quota)
    if load > 0.5 * limit:
        yield warning(
            "load",
            f"{load:.1f} threads want to run already, of {limit:.3g} that can",
            "See `top`; collectives wait for the slowest rank.",
        )
    else:
        yield fine("load", f"{load:.1f} threads running")


def memory() -> Findings:
    """The memory that ranks can have, and /dev/shm."""
    now, left = psutil.virtual_memory(), available_memory()
    free, whose = now.available, "of the host"
    text = f"{size_text(free)} of {size_text(now.total)} free"
    if left is not None and left < free:
        text += f"; the container leaves {size_text(left)}"
        free, whose = left, "of the container"
    if free < _RANK_BYTES:
        yield problem(
            "memory",
            f"{text}: not enough {whose} for one rank that imports torch",
            "Free memory or raise the limit; the kernel kills ranks (SIGKILL) otherwise.",
        )
    elif free < 4 * _RANK_BYTES:
        fits = f"about {free // _RANK_BYTES} ranks that only import torch"
        yield warning("memory", f"{text}: room for {fits}", "Start few ranks.")
    else:
        yield fine("memory", text)
    total = free = 0
    with contextlib.suppress(OSError):
        total, _, free = shutil.disk_usage("/dev/shm")
    if not os.access("/dev/shm", os.W_OK):
        seen = "it cannot be written" if total else "it does not exist"
        yield warning("/dev/shm", seen, "Mount a tmpfs with mode 1777: DataLoader needs it.")
    elif free < 256 << 20:
        yield warning(
            "/dev/shm",
            f"{size_text(free)} of {size_text(total)} free: DataLoader workers and NCCL may die "
            "with SIGBUS (Dure does not use it)",
            "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium: "
            "Memory; else `df /dev/shm`, and remove old files there.",
        )
    else:
        yield fine("/dev/shm", f"{size_text(free)} of {size_text(total)} free")


def sharing() -> Findings:
    """What the engine of one host needs: shared anonymous memory, and pidfds.

    A peer opens Dure's segments (memfd) through `/proc/PID/fd`, which a container, `hidepid` or a
    seccomp filter may forbid. The peer here is a child of this process.
    """
    memfd = _error_of(lambda: os.close(memory_file("dure-doctor")))
    peer = "" if memfd else _error_of(open_peer)
    if memfd:
        yield problem(
            "shared memory",
            f"anonymous memory is refused: {memfd}",
            "A seccomp profile forbids memfd_create: allow it, or use backend='gloo'.",
        )
    elif peer:
        yield problem(
            "shared memory",
            f"a peer's memory cannot be opened through /proc/PID/fd: {peer}",
            "Ranks must be of one user, in one PID namespace, and /proc mounted without "
            "hidepid=2; or use backend='gloo'.",
        )
    else:
        yield fine("shared memory", "anonymous memory is shared with a peer")
    if error := _error_of(lambda: os.close(os.pidfd_open(os.getpid()))):
        yield problem(
            "process watch",
            f"pidfd_open is refused: {error}",
            "Linux 5.3 or newer, and a seccomp profile that allows it (a newer docker).",
        )
    if int(kernel_text(Path("/proc/sys/kernel/yama/ptrace_scope")) or 0) >= 2:
        yield warning(
            "ptrace",
            "only root may use it: py-spy and gdb cannot look at ranks, and large tensors take one "
            "more copy",
            "sysctl kernel.yama.ptrace_scope=1",
        )


def _error_of(action: Callable[[], object]) -> str:
    """Return why `action` failed, or an empty text."""
    try:
        action()
    except OSError as error:
        return f"{error.strerror or error}"
    return ""


def open_peer() -> None:
    """Open the memory of a child as a rank opens that of another; raise OSError if refused."""
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


def limits() -> Findings:
    """How many files and processes this process may have, and how much memory it may lock."""
    files, mine, locked = (
        float("inf") if soft == resource.RLIM_INFINITY else soft
        for soft in (
            resource.getrlimit(name)[0]
            for name in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
        )
    )
    if files < 1024:
        make = problem if files < 256 else warning
        seen = f"at most {files} per process: few for ranks and DataLoader workers"
        yield make("open files", seen, "ulimit -n 65536")
    else:
        yield fine("open files", f"at most {files} per process")
    groups = [kernel_text(group / "pids.max") for group in control_groups(Path("/"), "pids")]
    limit, running = (
        min(mine, *(int(n) for n in groups if n.isdigit()), float("inf")),
        len(psutil.pids()),
    )
    if limit - running < 64:
        yield problem(
            "processes",
            f"at most {limit} processes and threads, and {running} are running: ranks and their "
            "threads will not start",
            "Raise ulimit -u, docker --pids-limit or the pod's limit.",
        )
    else:
        yield fine("processes", f"at most {limit} processes and threads")
    if Path("/sys/class/infiniband").is_dir() and locked < 1 << 30:
        yield problem(
            "locked memory",
            f"at most {size_text(locked)}, and there is an RDMA network, which locks its buffers",
            "ulimit -l unlimited (limits.conf: memlock; Slurm: PropagateResourceLimits; docker: "
            "--ulimit memlock=-1).",
        )


def network() -> Findings:
    """By which interface and name other hosts would reach this one; whether it reaches itself."""
    stats = psutil.net_if_stats()
    up: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        own = [a.address for a in addresses if a.family == socket.AF_INET]
        if name in stats and stats[name].isup and own:
            up[name] = own
    real = {name: own[0] for name, own in up.items() if not name.startswith(_VIRTUAL)}
    text = ", ".join(f"{name} {address}" for name, address in real.items())
    chosen = _set_variables("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    if error := _error_of(_connect_to_self):
        seen = f"this host cannot connect to itself: {error}"
        yield problem("interfaces", seen, "ip link set lo up; see the firewall's loopback rules.")
    elif len(real) > 1 and not chosen:
        yield note(
            "interfaces",
            f"{text}: backends may choose different ones on different hosts",
            "On several hosts name the fast one: `dure run --local-addr ADDRESS`, "
            "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME.",
        )
    else:
        yield fine("interfaces", text or "loopback only: no other hosts")
    for variable, value in chosen.items():
        wanted = [] if value.startswith("^") else [w.lstrip("=") for w in value.split(",")]
        missing = [w for w in wanted if not any(name.startswith(w) for name in up)]
        if missing:
            seen = f"{variable}={value}, but {', '.join(missing)} is not up here ({', '.join(up)})"
            yield problem("interfaces", seen, f"Correct or unset {variable}.")
    yield _own_name({address for own in up.values() for address in own}, bool(real))


def _connect_to_self() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=2.0).close()


def _own_name(own: set[str], has_network: bool) -> Finding:
    """Judge the addresses of this host's name.

    It is often 127.0.1.1 in /etc/hosts: rank 0 then gives the others an address that leads each of
    them to itself.
    """
    hostname, start = socket.gethostname(), time.monotonic()
    resolved: list[str] = []
    with contextlib.suppress(OSError):
        resolved = socket.gethostbyname_ex(hostname)[2]
    text = f"{hostname} is {', '.join(resolved) or 'not known to the resolver'}"
    if (took_s := time.monotonic() - start) > 0.5:
        advice = "Correct the name server in /etc/resolv.conf, or add the hosts to /etc/hosts."
        return warning("own name", f"{text}; looking it up took {took_s:.1f} s", advice)
    elsewhere = [address for address in resolved if not address.startswith("127.")]
    if has_network and not elsewhere:
        return note(
            "own name",
            f"{text}: other hosts cannot use this name",
            "On several hosts give MASTER_ADDR (or --rdzv-endpoint) as an address, not as this "
            "name; or correct /etc/hosts.",
        )
    if set(elsewhere) - own:
        seen = f"{text}, but this host has only {', '.join(sorted(own))}"
        return warning("own name", seen, "Correct the name server or /etc/hosts, or use addresses.")
    return fine("own name", text)


def keys() -> Findings:
    """Whether the keys of jobs can be read, and only by this user."""
    named = env.text("DURE_JOB_KEY_FILE")
    for path in [Path(named)] if named else [user_key_path()]:
        if not named and not path.exists():
            yield fine("job key", "the user has no key yet; it is made on first use")
            continue
        try:
            key_from_file(path)
        except DureError as error:
            yield problem("job key", f"{error.what}: {error.seen}", error.fix)
        else:
            yield fine("job key", f"{path}")
    if env.flag("DURE_INSECURE"):
        yield warning(
            "job key",
            "DURE_INSECURE is set: everyone who reaches the store's port can join a job",
            "Unset it; `dure run` makes a key for each job.",
        )


def environment() -> Findings:
    """Variables that would surprise a job started from here."""
    variables = _set_variables(*RANK_VARIABLES, "DURE_LAUNCHER", "OMP_NUM_THREADS")
    given = [name for name in RANK_VARIABLES if name in variables]
    threads, usable = variables.get("OMP_NUM_THREADS", ""), usable_cores()
    found: list[Finding] = []
    if unknown := env.unknown_note():
        advice = "Correct the name, or unset it: dure env --all."
        found.append(warning("environment", unknown, advice))
    if 0 < len(given) < len(RANK_VARIABLES) and "DURE_LAUNCHER" not in variables:
        seen = f"{', '.join(given)} set, but not the other variables of a rank"
        advice = f"unset {' '.join(given)}, unless a scheduler has set them (see `dure env`)."
        found.append(warning("environment", seen, advice))
    if threads.isdigit() and int(threads) > usable:
        seen = f"OMP_NUM_THREADS={threads}, with {usable} usable hardware threads"
        advice = "unset OMP_NUM_THREADS; `dure run` chooses it from cores and ranks."
        found.append(warning("environment", seen, advice))
    yield from found or [fine("environment", "no unexpected variables")]


def _set_variables(*names: str) -> dict[str, str]:
    return {name: value for name in names if (value := env.text(name))}


def leftovers() -> Findings:
    """Ranks of jobs whose launcher is gone: they keep memory, GPUs and ports."""
    jobs: dict[int, str] = {}
    parents: dict[int, psutil.Process] = {}
    for process in psutil.process_iter(["environ", "uids", "ppid", "name", "create_time"]):
        environ, uids = process.info["environ"], process.info["uids"]
        if environ and "DURE_LAUNCHER" in environ and uids and uids.real == os.getuid():
            jobs[process.pid] = environ["DURE_LAUNCHER"]
            parents[process.pid] = process
    left = [
        p.info for pid, p in parents.items() if p.info["ppid"] == 1 and jobs.get(1) != jobs[pid]
    ]
    if not left:
        yield fine("leftovers", f"none (running jobs: {len(set(jobs.values()))})")
        return
    now = time.time()
    names = ", ".join(
        f"{i['name']} (pid {i['pid']}, {(now - i['create_time']) / 60:.0f} min)" for i in left[:8]
    )
    yield warning(
        "leftovers",
        f"{len(left)} processes of jobs whose launcher is gone: {names}",
        f"If you do not need them: kill {' '.join(str(i['pid']) for i in left[:8])}",
    )


class Gpu(NamedTuple):
    """One card as nvidia-smi shows it; memory in MiB."""

    number: str
    name: str
    driver: str
    total_mib: int
    used_mib: int
    mode: str = "Default"


def nvidia_cards() -> tuple[list[Gpu], str]:
    """Return the cards that nvidia-smi shows, and its error if it is installed and fails."""
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


def gpus(torch: Mapping[str, Any]) -> Findings:
    """Compare the driver's view of GPUs with that of torch.

    Args:
        torch: What a rank reported: `torch`, `cuda`, `gpus`, `apart`; empty if none did.
    """
    cards, error = nvidia_cards()
    seen: list[str] = torch.get("gpus", [])
    if error:
        yield problem(
            "GPUs",
            f"nvidia-smi fails: {error}",
            "The driver is not loaded or was upgraded under a running kernel: reboot, or start "
            "the container with --gpus all.",
        )
    elif not cards:
        yield fine("GPUs", f"torch sees {len(seen)}" if seen else "none; CPU only")
    elif torch:
        yield _gpus_of_torch(cards, torch, len(seen))
    for card in cards:
        name = f"GPU {card.number}"
        text = f"{card.name}, {card.total_mib - card.used_mib} of {card.total_mib} MiB free"
        if "Prohibited" in card.mode or "Exclusive" in card.mode:
            yield warning(name, f"{text}, mode {card.mode}", "nvidia-smi -c DEFAULT, to share it.")
        elif card.used_mib > 0.5 * card.total_mib:
            yield warning(name, f"{text}: it is in use", "`nvidia-smi` lists the processes.")
        else:
            yield fine(name, text)
    if torch.get("apart"):
        pairs = ", ".join(f"{i} to {j}" for i, j in torch["apart"][:6])
        yield warning(
            "GPU peers",
            f"no direct access from {pairs}: copies go through the host",
            "Use cards on one switch; in a virtual machine ask for peer access.",
        )


def _gpus_of_torch(cards: list[Gpu], torch: Mapping[str, Any], seen: int) -> Finding:
    if torch.get("cuda") is None:
        return warning(
            "GPUs",
            f"{len(cards)} cards, but torch {torch['torch']} was built without CUDA",
            "pip install torch (not a +cpu build), unless CPU is what you want.",
        )
    if not seen:
        return problem(
            "GPUs",
            f"{len(cards)} cards, but torch {torch['torch']} (CUDA {torch['cuda']}) can use none; "
            f"the driver is {cards[0].driver}",
            "The driver is older than this CUDA: upgrade it, or install a torch for an older CUDA; "
            "or unset CUDA_VISIBLE_DEVICES.",
        )
    text = f"torch (CUDA {torch['cuda']}) sees {seen} of {len(cards)}"
    if seen < len(cards) and not env.text("CUDA_VISIBLE_DEVICES"):
        return warning("GPUs", text, "See CUDA_VISIBLE_DEVICES, and nvidia-smi for broken cards.")
    return fine("GPUs", text)


CHECKS: tuple[Callable[[], Findings], ...] = (
    versions,
    cores,
    memory,
    sharing,
    limits,
    network,
    keys,
    environment,
    leftovers,
)
