"""What the doctor says of a machine: each check judges values, and looks at nothing else.

So a test can make up a machine. `machine` reads the values of this one.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple  # Any: what a rank told as JSON

from dure.trace.logs import size_text

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OLDEST_KERNEL = (5, 6)  # pidfd_getfd; pidfd_open and memfd are older
_RANK_BYTES = 300 << 20  # a rank that has imported torch
_VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "tun", "tap", "wg")


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
    """`advice` is empty where nothing needs doing, `host` where only this one was asked."""

    level: Level
    check: str
    seen: str
    advice: str = ""
    host: str = ""


Findings = Iterator[Finding]
fine = partial(Finding, Level.OK)
note = partial(Finding, Level.NOTE)
warning = partial(Finding, Level.WARNING)
problem = partial(Finding, Level.PROBLEM)


def versions(python: str, packages: Mapping[str, str]) -> Findings:
    """A package that is not there is not in `packages`."""
    shown = ", ".join(f"{name} {number}" for name, number in packages.items())
    yield fine("versions", f"Python {python}, {shown}")
    torch = packages.get("torch")
    if torch is None:
        yield problem("torch", "not installed", "pip install torch")
    elif _numbers(torch) < (2, 11):
        yield problem("torch", f"{torch} is older than 2.11", "pip install --upgrade torch")
    elif _numbers(torch) >= (2, 14):
        seen = f"{torch} is newer than 2.13, the newest that the tests have passed with"
        yield warning("torch", seen, "pip install 'torch<2.14'")


def checkout(version: str, commit: str) -> Findings:
    """Compare the commit that the version names with that of the checkout, "none" without one."""
    built = version.partition("+g")[2].partition(".")[0]
    at = commit.partition("-")[0]
    if built and at != "none" and not (built.startswith(at) or at.startswith(built)):
        yield note(
            "checkout",
            f"it is at {commit}, and Dure was installed from {built}: its version, which the ranks "
            "of a job compare, is that of the installation",
            "Install it again in this checkout: `make setup`, or `pip install -e .`.",
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, as in (2, 13, 0) of 2.13.0+cpu."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def system(name: str, kernel: str, machine: str) -> Findings:
    text = f"{name} {kernel} on {machine}"
    if name != "Linux":
        unsupported = f"{text}: no shared-memory engine, no `dure run`"
        yield warning("system", unsupported, "backend='gloo' works.")
    elif _numbers(kernel) < _OLDEST_KERNEL:
        yield warning("system", f"{text}: older than 5.6", "A newer kernel; or backend='gloo'.")
    else:
        yield fine("system", text)


def cores(total: int, usable: int, quota: float, load: float, governor: str) -> Findings:
    """`quota` is in cores, or infinite."""
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
    limit = min(usable, quota)
    if load > 0.5 * limit:
        yield warning(
            "load",
            f"{load:.1f} threads want to run already, of {limit:.3g} that can",
            "Look with `top` who they are; collectives wait for the slowest rank.",
        )
    else:
        yield fine("load", f"{load:.1f} threads running")
    if governor == "powersave":
        advice = "For speed: `cpupower frequency-set -g performance`."
        yield warning("clock rate", "the cores save power", advice)


def memory(total: int, free: int, swapped: int, left: int | None) -> Findings:
    """`left` are the bytes that a container leaves this process."""
    text, whose = f"{size_text(free)} of {size_text(total)} free", "of the host"
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
    if swapped > total // 10:
        yield warning(
            "swap",
            f"{size_text(swapped)} swapped out: whoever needs it again waits for the disk",
            "Free memory before measuring or training.",
        )


def huge_pages(private: str, shared: str) -> Findings:
    """Both are chosen words of the kernel's setting, or nothing."""
    if private == "never":
        yield warning(
            "huge pages",
            "switched off: large tensors cost more page faults",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    else:
        yield fine("huge pages", f"{private or 'unknown'}, shared {shared or 'unknown'}")


def shm(total: int, free: int, writable: bool) -> Findings:
    """Dure does not use /dev/shm, but DataLoader workers and NCCL do; `total` 0: there is none."""
    text = f"{size_text(free)} of {size_text(total)} free"
    if not writable:
        yield warning(
            "/dev/shm",
            "it cannot be written" if total else "there is none",
            "Mount a tmpfs there with mode 1777: DataLoader needs it.",
        )
    elif free < 256 << 20:
        yield warning(
            "/dev/shm",
            f"{text}: DataLoader workers and NCCL may die with SIGBUS (Dure does not use it)",
            "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium: "
            "Memory; else `df /dev/shm`, and remove what is left there.",
        )
    else:
        yield fine("/dev/shm", text)


def engine(memfd_error: str, peer_error: str, pidfd_error: str) -> Findings:
    """Say whether ranks of this host can share memory; an error is empty where it worked."""
    if memfd_error:
        yield problem(
            "shared memory",
            f"anonymous memory is refused: {memfd_error}",
            "A seccomp profile forbids memfd_create: allow it, or use backend='gloo'.",
        )
    elif peer_error:
        yield problem(
            "shared memory",
            f"a peer's memory cannot be opened through /proc/PID/fd: {peer_error}",
            "Ranks must be one user's, in one PID namespace, and /proc mounted without hidepid=2; "
            "or use backend='gloo'.",
        )
    else:
        yield fine("shared memory", "anonymous memory is shared with a peer")
    if pidfd_error:
        yield problem(
            "process watch",
            f"pidfd_open is refused: {pidfd_error}",
            "Linux 5.3 or newer, and a seccomp profile that allows it (a newer docker).",
        )


def ptrace(scope: int, container: str, seccomp: bool) -> Findings:
    text = f"in a {container} container" if container else "no container seen"
    text += ", with a seccomp filter" if seccomp else ""
    if scope >= 2:
        yield warning(
            "ptrace",
            f"{text}; ptrace is for root alone (scope {scope}): py-spy and gdb cannot look at "
            "ranks, and large tensors take one more copy",
            "sysctl kernel.yama.ptrace_scope=1",
        )
    else:
        yield fine("ptrace", f"{text}; ptrace {'of descendants only' if scope else 'unrestricted'}")


def locked_memory(limit: float, fabric: bool) -> Findings:
    """`limit` is in bytes, and infinite without one; on a `fabric` for RDMA buffers are locked."""
    if limit == float("inf"):
        yield fine("locked memory", "no limit")
    elif fabric and limit < 1 << 30:
        yield problem(
            "locked memory",
            f"at most {size_text(limit)}, and there is an RDMA network, which locks its buffers",
            "ulimit -l unlimited (limits.conf: memlock; Slurm: PropagateResourceLimits; docker: "
            "--ulimit memlock=-1).",
        )
    else:
        yield fine("locked memory", f"at most {size_text(limit)} (enough without RDMA)")


def files(limit: float) -> Findings:
    text = "no limit" if limit == float("inf") else f"at most {limit} a process"
    if limit < 256:
        yield problem("open files", text, "ulimit -n 65536")
    elif limit < 1024:
        yield warning("open files", f"{text}: few for DataLoader workers", "ulimit -n 65536")
    else:
        yield fine("open files", text)


def processes(limit: float, running: int) -> Findings:
    """`limit` is the lowest of the user's and the container's; threads count, too."""
    text = f"at most {limit} processes and threads, {running} processes are there"
    if limit == float("inf"):
        yield fine("processes", "no limit")
    elif limit - running < 64:
        yield problem(
            "processes",
            f"{text}: ranks and their threads will not start",
            "ulimit -u, or docker --pids-limit / the pod's limit, must be raised.",
        )
    elif limit < 1024:
        yield warning("processes", text, "Set OMP_NUM_THREADS low, or raise the limit.")
    else:
        yield fine("processes", text)


def temporary_files(free: int, folder: str) -> Findings:
    text = f"{size_text(free)} free in {folder}"
    if free < 100 << 20:
        advice = "Free some, or set TMPDIR: torch's compiler and shared tensors write there."
        yield problem("temporary files", text, advice)
    else:
        yield fine("temporary files", text)


class Interface(NamedTuple):
    """One that is up: its name, IPv4 addresses, and Mbit/s (0: it does not say)."""

    name: str
    addresses: tuple[str, ...]
    mbits: int = 0

    @property
    def is_real(self) -> bool:
        """Whether it may lead to other hosts."""
        return not self.name.startswith(_VIRTUAL) and not all(map(_loops, self.addresses))


def _loops(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def interfaces(known: Sequence[Interface], default: str, chosen: Mapping[str, str]) -> Findings:
    """Say by which interface other hosts would reach this one.

    Args:
        known: Those that are up.
        default: The name of the one that has the default route; empty without one.
        chosen: What the variables name that choose an interface, such as GLOO_SOCKET_IFNAME.
    """
    real = [i for i in known if i.is_real]
    speeds = [f" ({i.mbits // 1000} Gbit/s)" if i.mbits >= 1000 else "" for i in real]
    text = ", ".join(
        f"{i.name} {i.addresses[0]}{speed}" for i, speed in zip(real, speeds, strict=True)
    )
    if not any(_loops(address) for i in known for address in i.addresses):
        no_loopback = "no loopback interface is up: no job can start"
        yield problem("interfaces", no_loopback, "ip link set lo up")
    elif not real:
        yield note(
            "interfaces",
            "loopback only: jobs on this host work, with other hosts they cannot",
            "Bring an interface up, if there are other hosts.",
        )
    elif len(real) > 1 and not chosen:
        yield note(
            "interfaces",
            f"{text}: engines may choose different ones on different hosts "
            f"(the default route is {default or 'missing'})",
            "On several hosts name the fast one: `dure run --local-addr ADDRESS`, "
            "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME.",
        )
    else:
        yield fine("interfaces", text)
    names = sorted(i.name for i in known)
    for variable, value in chosen.items():
        wanted = [] if value.startswith("^") else [w.lstrip("=") for w in value.split(",")]
        missing = [w for w in wanted if not any(name.startswith(w) for name in names)]
        if missing:
            yield problem(
                "interfaces",
                f"{variable}={value}, but {', '.join(missing)} is not up here "
                f"(there are {', '.join(names)})",
                f"Correct or unset {variable}.",
            )


def own_name(hostname: str, resolved: Sequence[str], known: Sequence[Interface]) -> Findings:
    """Say whether the addresses that this host's name stands for lead to it from elsewhere.

    A host's own name often stands for 127.0.1.1 in /etc/hosts: rank 0 then tells the others an
    address that leads each of them to itself.
    """
    own = sorted({address for i in known for address in i.addresses})
    text = f"{hostname} is {', '.join(resolved)}"
    if not resolved:
        yield note(
            "own name",
            f"{hostname} stands for no address",
            f"Add a line `ADDRESS {hostname}` to /etc/hosts; on one host it does not matter.",
        )
    elif all(map(_loops, resolved)) and not all(map(_loops, own)):
        yield note(
            "own name",
            f"{text}: other hosts that are told this address would reach themselves",
            "On several hosts give MASTER_ADDR (or --rdzv-endpoint) as an address, not as this "
            "name; or correct /etc/hosts.",
        )
    elif any(a not in own and not _loops(a) for a in resolved):
        yield warning(
            "own name",
            f"{text}, but this host has only {', '.join(own)}",
            "The name server or /etc/hosts is out of date; use an address instead of the name.",
        )
    else:
        yield fine("own name", text)


def look_ups(own_s: float, reverse_s: float) -> Findings:
    """Judge how long this host's own name takes, and how long the names of its addresses."""
    slowest = max(own_s, reverse_s)
    if slowest > 0.5:
        kind = "this host's own name" if own_s >= 0.5 else "names of addresses"
        yield warning(
            "name look-up",
            f"asking for {kind} takes {slowest:.1f} s: everything that logs a client's name waits",
            "Correct the name server in /etc/resolv.conf, or add the hosts to /etc/hosts.",
        )
    else:
        yield fine("name look-up", f"{slowest * 1e3:.0f} ms")


def ports(first: int, last: int, used: int, usual_by: str, loopback_error: str) -> Findings:
    """Say whether a store can listen; `usual_by` is who holds port 29500, empty if nobody."""
    if loopback_error:
        yield problem(
            "ports",
            f"this host cannot connect to itself: {loopback_error}",
            "ip link set lo up; and see the firewall's rules for the loopback interface.",
        )
        return
    room = last - first + 1 - used
    text = f"{room} of {first}-{last} free"
    if room < 2000:
        yield warning(
            "ports",
            f"{text}: connections may fail with EADDRNOTAVAIL",
            'sysctl -w net.ipv4.ip_local_port_range="15000 65000"',
        )
    else:
        yield fine("ports", text)
    if usual_by:
        yield warning(
            "port 29500",
            f"taken by {usual_by}: torchrun and scripts with the usual MASTER_PORT fail here",
            "Choose another MASTER_PORT (`dure run` does by itself), or end that process.",
        )


def clock(synchronised: bool, source: str, read_ns: float) -> Findings:
    text = f"source {source}, {read_ns:.0f} ns a reading"
    if read_ns > 500:
        yield warning(
            "clock",
            f"{text}: measuring and tracing become slow",
            "Use the clock source tsc or kvm-clock, if the host lets you.",
        )
    else:
        yield fine("clock", text)
    if not synchronised:
        yield note(
            "clock",
            "the time of day is not synchronised: traces and logs of several hosts do not line up "
            "(it does not matter on one)",
            "Start chrony or systemd-timesyncd (in a virtual machine its host may do it).",
        )


def key_file(
    path: Path, file: os.stat_result | None, folder_mode: int, user: int, *, named: bool
) -> Findings:
    """Say whether a key is a secret of `user`; `named`: DURE_JOB_KEY_FILE says where it is."""
    if file is None and not named:
        yield fine("job key", "no key of your own yet; it is made on first use")
    elif file is None:
        advice = "Copy the key there (mode 0600), or unset the variable."
        yield problem("job key", f"DURE_JOB_KEY_FILE names {path}: no such file", advice)
    elif file.st_uid != user:
        advice = f"chown it, or remove it: {path}"
        yield problem("job key", f"{path} belongs to another user ({file.st_uid})", advice)
    elif file.st_mode & 0o077:
        mode = stat.S_IMODE(file.st_mode)
        seen = f"{path} has mode {mode:04o}: others can read or change it"
        advice = f"Remove it, since it is known now, and let a new one be made: rm {path}"
        yield problem("job key", seen, advice)
    elif folder_mode & 0o022 and not folder_mode & stat.S_ISVTX:
        seen = f"others can write to {path.parent}, and so replace the key"
        yield problem("job key", seen, f"chmod go-w {path.parent}")
    else:
        yield fine("job key", f"{path}, mode {stat.S_IMODE(file.st_mode):04o}")


def environment(
    variables: Mapping[str, str], usable: int, *, insecure: bool, unknown: str = ""
) -> Findings:
    """Say what would surprise a job started from here; `usable` hardware threads are there."""
    given = [name for name in RANK_VARIABLES if name in variables]
    partly = 0 < len(given) < len(RANK_VARIABLES) and "DURE_LAUNCHER" not in variables
    threads = variables.get("OMP_NUM_THREADS", "")
    many = threads.isdigit() and int(threads) > usable
    if insecure:
        yield warning(
            "job key",
            "DURE_INSECURE is set: whoever reaches the store's port can join a job",
            "Unset it; `dure run` mints a key for each job by itself.",
        )
    if unknown:
        yield warning("environment", unknown, "Correct the name, or unset it: dure env --all.")
    if partly:
        yield warning(
            "environment",
            f"{', '.join(given)} set, but not the rest of a rank's variables",
            f"unset {' '.join(given)}, unless a scheduler has set them (`dure env` says who).",
        )
    if many:
        yield warning(
            "environment",
            f"OMP_NUM_THREADS={threads}, with {usable} usable hardware threads",
            "unset OMP_NUM_THREADS; `dure run` chooses it from cores and ranks.",
        )
    if not many and not partly and not unknown:
        yield fine("environment", "nothing in the way")


class Orphan(NamedTuple):
    """A rank whose launcher is gone: nobody waits for it any more."""

    pid: int
    command: str
    age_s: float


def leftovers(jobs: int, left: Sequence[Orphan]) -> Findings:
    """Name ranks of jobs that are over: they keep memory, GPUs and ports."""
    if not left:
        yield fine("leftovers", f"none (running jobs: {jobs})")
        return
    names = ", ".join(f"{o.command} (pid {o.pid}, {o.age_s / 60:.0f} min)" for o in left[:8])
    numbers = " ".join(str(orphan.pid) for orphan in left[:8])
    yield warning(
        "leftovers",
        f"{len(left)} processes of jobs whose launcher is gone: {names}",
        f"If they are not wanted (an elastic job may go on): kill {numbers}",
    )


class Gpu(NamedTuple):
    """One card as nvidia-smi shows it; memory in MiB."""

    number: str
    name: str
    driver: str
    total_mib: int
    used_mib: int
    mode: str = "Default"


def gpus(cards: Sequence[Gpu], error: str, torch: Mapping[str, Any], hidden: bool) -> Findings:
    """Compare what the driver shows with what torch sees.

    Args:
        cards: The driver's view.
        error: Why nvidia-smi failed, where it is installed.
        torch: What a rank told: `torch`, `cuda`, `gpus`, `apart`; empty if none did.
        hidden: CUDA_VISIBLE_DEVICES chooses among them.
    """
    seen: list[str] = torch.get("gpus", [])
    if error:
        yield problem(
            "GPUs",
            f"nvidia-smi fails: {error}",
            "The driver is not loaded or was upgraded under a running kernel: reboot, or start "
            "the container with --gpus all.",
        )
        return
    if not cards:
        yield fine("GPUs", f"torch sees {len(seen)}" if seen else "none; CPU only")
        return
    if torch:
        yield _gpus_of_torch(cards, torch, len(seen), hidden)
    for card in cards:
        name = f"GPU {card.number}"
        text = f"{card.name}, {card.total_mib - card.used_mib} of {card.total_mib} MiB free"
        if "Prohibited" in card.mode or "Exclusive" in card.mode:
            yield warning(name, f"{text}, mode {card.mode}", "nvidia-smi -c DEFAULT, to share it.")
        elif card.used_mib > 0.5 * card.total_mib:
            yield warning(name, f"{text}: somebody uses it", "`nvidia-smi` lists the processes.")
        else:
            yield fine(name, text)
    if torch.get("apart"):
        pairs = ", ".join(f"{i} to {j}" for i, j in torch["apart"][:6])
        yield warning(
            "GPU peers",
            f"no direct access from {pairs}: copies go through the host",
            "Use cards on one switch; in a virtual machine ask for peer access.",
        )


def _gpus_of_torch(
    cards: Sequence[Gpu], torch: Mapping[str, Any], seen: int, hidden: bool
) -> Finding:
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
    if seen < len(cards) and not hidden:
        return warning("GPUs", text, "See CUDA_VISIBLE_DEVICES, and nvidia-smi for broken cards.")
    return fine("GPUs", text)


def same_versions(mine: Mapping[str, str], others: Mapping[str, str], host: str) -> Finding:
    differ = [name for name in sorted({*mine, *others}) if mine.get(name) != others.get(name)]
    if not differ:
        return fine("same versions", "as here")
    text = ", ".join(
        f"{n} {others.get(n, 'missing')} (here {mine.get(n, 'missing')})" for n in differ
    )
    make = problem if {"dure", "torch", "python"} & set(differ) else warning
    return make("same versions", text, f"Install the same ones on {host} as here.")


def clock_difference(ahead_s: float, uncertain_s: float) -> Finding:
    """Judge how far another host's clock is ahead of this one's."""
    text = f"{ahead_s * 1e3:+.0f} ms from this host's (+-{uncertain_s * 1e3:.0f} ms)"
    if abs(ahead_s) - uncertain_s > 1.0:
        return warning("clock difference", text, "Synchronise the clocks of all hosts (chrony).")
    return fine("clock difference", text)


def connection(reached: bool, way: str) -> Finding:
    if reached:
        return fine("connections", f"{way}: open")
    advice = "A firewall: open the range of local ports between the hosts of the job."
    return problem("connections", f"{way}: a free port cannot be reached", advice)
