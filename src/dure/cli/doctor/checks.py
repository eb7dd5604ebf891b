"""The checks of `dure doctor`: each reads something of this machine, and judges it.

A check changes nothing, and yields what it found. The last ones start ranks with `dure run`, which
always ends them.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple  # Any: a rank's report as JSON

import psutil

import dure
from dure import env
from dure.cli.machine import QUIET_VARIABLES, commit, usable_cores
from dure.cli.version import checkout_note
from dure.errors import DureError
from dure.launch.ranks.limits import available_memory
from dure.store.key import key_from_file, user_key_path
from dure.store.system import control_groups, cpu_quota, kernel_text
from dure.trace.logs import size_text
from dure.version import NEWEST_TORCH, OLDEST_TORCH

MARK = "DURE-DOCTOR "
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OLDEST_KERNEL = (5, 6)  # pidfd_getfd; pidfd_open and memfd are older
_RANK_BYTES = 300 << 20  # a rank that has imported torch
_VIRTUAL = ("lo", "docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "tun", "tap", "wg")
_ADVICE = {
    "shm": "Ranks must be of one user, in one PID namespace, with /proc mounted without hidepid=2 "
    "and a seccomp profile that allows memfd_create and pidfd_open; or use backend='gloo'.",
    "gloo": "See the findings above: an address or a library is the usual cause.",
    "nccl": "See `nvidia-smi topo -m`, and NCCL_DEBUG=INFO.",
}


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
    torch = found.get("torch", "")
    if _numbers(torch) < _numbers(OLDEST_TORCH):
        seen = f"{torch} is older than {OLDEST_TORCH}" if torch else "not installed"
        yield problem("torch", seen, "pip install --upgrade torch")
    elif _numbers(torch)[:2] > _numbers(NEWEST_TORCH):
        seen = f"{torch} is newer than {NEWEST_TORCH}, the newest that the tests have passed with"
        yield warning("torch", seen, f"pip install 'torch=={NEWEST_TORCH}.*'")
    if text := checkout_note(dure.__version__, commit()):
        yield note("checkout", text, "Install it again: `make setup`, or `pip install -e .`.")
    text = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() != "Linux" or _numbers(platform.release()) < _OLDEST_KERNEL:
        seen = f"{text}: the shared-memory engine needs Linux 5.6"
        yield warning("system", seen, "backend='gloo' works.")
    else:
        yield fine("system", text)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, as in (2, 13, 0) of 2.13.0+cpu."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def cores() -> Findings:
    """The cores this process may use, and other load on them."""
    total = os.cpu_count() or 1
    usable, load = min(usable_cores(), cpu_quota()), os.getloadavg()[0]
    text = f"{usable:.3g} of {total} hardware threads usable"
    if usable < total - 0.01:
        yield warning(
            "cores",
            f"{text}: this process is bound to some, or its container has a quota",
            f"Start at most {max(1, int(usable))} ranks, or raise the limit (taskset, srun "
            "--cpus-per-task, docker --cpus, resources.limits.cpu).",
        )
    else:
        yield fine("cores", text)
    text = f"{load:.1f} threads want to run already, of {usable:.3g} that can"
    if load > 0.5 * usable:
        yield warning("load", text, "See `top`; collectives wait for the slowest rank.")
    else:
        yield fine("load", text)


def memory() -> Findings:
    """The memory that ranks can have, and /dev/shm."""
    now, left = psutil.virtual_memory(), available_memory()
    free = now.available if left is None else min(now.available, left)
    text = f"{size_text(free)} of {size_text(now.total)} free for this process"
    if free < 4 * _RANK_BYTES:
        make = problem if free < _RANK_BYTES else warning
        seen = f"{text}: room for {free // _RANK_BYTES} ranks that only import torch"
        advice = "Free memory, or raise the container's limit; else the kernel kills ranks."
        yield make("memory", seen, advice)
    else:
        yield fine("memory", text)
    free = 0
    with contextlib.suppress(OSError):
        free = shutil.disk_usage("/dev/shm").free
    if free < 256 << 20:
        yield warning(
            "/dev/shm",
            f"{size_text(free)} free: DataLoader workers and NCCL may die with SIGBUS (Dure does "
            "not use it)",
            "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir with medium: "
            "Memory; else remove old files there.",
        )
    else:
        yield fine("/dev/shm", f"{size_text(free)} free")


def limits() -> Findings:
    """How many files and processes this process may have, and how much memory it may lock."""
    files = _limit(resource.RLIMIT_NOFILE)
    text = f"at most {files} per process"
    if files < 1024:
        make = problem if files < 256 else warning
        yield make("open files", f"{text}: few for ranks and DataLoader", "ulimit -n 65536")
    else:
        yield fine("open files", text)
    groups = [kernel_text(group / "pids.max") for group in control_groups(Path("/"), "pids")]
    most = min(_limit(resource.RLIMIT_NPROC), *(int(n) for n in groups if n.isdigit()), 1 << 62)
    running = len(psutil.pids())
    text = f"at most {most} processes and threads, and {running} are running"
    if most - running < 64:
        yield problem("processes", text, "Raise ulimit -u, docker --pids-limit or the pod's limit.")
    else:
        yield fine("processes", text)
    locked = _limit(resource.RLIMIT_MEMLOCK)
    if Path("/sys/class/infiniband").is_dir() and locked < 1 << 30:
        yield problem(
            "locked memory",
            f"at most {size_text(int(locked))}, and an RDMA network locks its buffers",
            "ulimit -l unlimited (limits.conf: memlock; Slurm: PropagateResourceLimits; docker: "
            "--ulimit memlock=-1).",
        )


def _limit(kind: int) -> float:
    soft = resource.getrlimit(kind)[0]
    return float("inf") if soft == resource.RLIM_INFINITY else soft


def network() -> Findings:
    """By which interface and name other hosts would reach this one."""
    stats = psutil.net_if_stats()
    up: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and name in stats and stats[name].isup:
                up[name] = address.address
    real = {name: address for name, address in up.items() if not name.startswith(_VIRTUAL)}
    text = ", ".join(f"{name} {address}" for name, address in real.items())
    chosen = _set_variables("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for variable, value in chosen.items():
        wanted = [] if value.startswith("^") else [w.lstrip("=") for w in value.split(",")]
        if missing := [w for w in wanted if not any(name.startswith(w) for name in up)]:
            seen = f"{variable}={value}, but {', '.join(missing)} is not up here ({', '.join(up)})"
            yield problem("interfaces", seen, f"Correct or unset {variable}.")
    if len(real) > 1 and not chosen:
        yield note(
            "interfaces",
            f"{text}: backends may choose different ones on different hosts",
            "On several hosts name the fast one: `dure run --local-addr ADDRESS`, "
            "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME.",
        )
    else:
        yield fine("interfaces", text or "loopback only: no other hosts")
    yield _own_name(bool(real))


def _own_name(has_network: bool) -> Finding:
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
    if has_network and all(address.startswith("127.") for address in resolved):
        return note(
            "own name",
            f"{text}: other hosts cannot use this name",
            "On several hosts give MASTER_ADDR (or --rdzv-endpoint) as an address, not as this "
            "name; or correct /etc/hosts.",
        )
    return fine("own name", text)


def keys() -> Findings:
    """Whether the key of jobs can be read, and only by this user."""
    path = Path(env.text("DURE_JOB_KEY_FILE") or user_key_path())
    if path == user_key_path() and not path.exists():
        yield fine("job key", "the user has no key yet; it is made on first use")
    else:
        try:
            key_from_file(path)
        except DureError as error:
            yield problem("job key", f"{error.what}: {error.seen}", error.fix)
        else:
            yield fine("job key", f"{path}")
    if env.flag("DURE_INSECURE"):
        seen = "DURE_INSECURE is set: everyone who reaches the store's port can join a job"
        yield warning("job key", seen, "Unset it; `dure run` makes a key for each job.")


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
    left: list[str] = []
    for process in psutil.process_iter(["pid", "environ", "uids", "ppid", "name", "cmdline"]):
        info = process.info
        if info["pid"] == 1 and "dure" in " ".join(info["cmdline"] or ()):
            break  # the launcher of a container: its ranks are no orphans
        mine = info["uids"] and info["uids"].real == os.getuid()
        if mine and info["ppid"] == 1 and "DURE_LAUNCHER" in (info["environ"] or ()):
            left.append(f"{info['pid']} ({info['name']})")
    if left:
        seen = f"processes of jobs whose launcher is gone: {', '.join(left)}"
        yield warning("leftovers", seen, "If you do not need them: kill PID.")
    else:
        yield fine("leftovers", "none")


class GpuStatus(NamedTuple):
    """One card as nvidia-smi shows it; memory in MiB."""

    number: str
    name: str
    driver: str
    total_mib: int
    used_mib: int


def nvidia_cards() -> tuple[list[GpuStatus], str]:
    """Return the cards that nvidia-smi shows, and its error if it is installed and fails."""
    if shutil.which("nvidia-smi") is None:
        return [], ""
    query = "--query-gpu=index,name,driver_version,memory.total,memory.used"
    words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=5.0, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    if done.returncode != 0:
        return [], (done.stdout + done.stderr).strip()
    cards: list[GpuStatus] = []
    for number, name, driver, *sizes in csv.reader(done.stdout.splitlines(), skipinitialspace=True):
        total, used = (int(text) if text.isdigit() else 0 for text in sizes)
        cards.append(GpuStatus(number, name, driver, total, used))
    return cards, ""


def gpus(torch: Mapping[str, Any]) -> Findings:
    """Compare the driver's view of GPUs with that of torch.

    Args:
        torch: A rank's report: `torch`, `cuda`, `gpus`; empty if none did.
    """
    cards, error = nvidia_cards()
    seen: list[str] = torch.get("gpus", [])
    text = f"nvidia-smi shows {len(cards)}, torch sees {len(seen)}"
    if error:
        yield problem(
            "GPUs",
            f"nvidia-smi fails: {error}",
            "The driver is not loaded or was upgraded under a running kernel: reboot, or start "
            "the container with --gpus all.",
        )
    elif not torch or not cards:
        yield fine("GPUs", text if torch else f"nvidia-smi shows {len(cards)}")
    elif torch["cuda"] is None:
        advice = "pip install torch (not a +cpu build), unless CPU is what you want."
        yield warning("GPUs", f"{text}: {torch['torch']} was built without CUDA", advice)
    elif not seen:
        yield problem(
            "GPUs",
            f"{text}: it was built for CUDA {torch['cuda']}, and the driver is {cards[0].driver}",
            "Upgrade the driver, or install a torch for an older CUDA; or unset "
            "CUDA_VISIBLE_DEVICES.",
        )
    elif len(seen) < len(cards) and not env.text("CUDA_VISIBLE_DEVICES"):
        yield warning("GPUs", text, "See nvidia-smi for broken cards.")
    else:
        yield fine("GPUs", text)
    for card in cards:
        text = f"{card.name}, {card.total_mib - card.used_mib} of {card.total_mib} MiB free"
        if card.used_mib > 0.5 * card.total_mib:
            yield warning(f"GPU {card.number}", text, "`nvidia-smi` lists the processes.")
        else:
            yield fine(f"GPU {card.number}", text)


CHECKS: tuple[Callable[[], Findings], ...] = (
    *(versions, cores, memory, limits, network, keys, environment, leftovers),
)


def collectives(limit_s: float) -> Findings:
    """Try a small collective of two ranks over each backend, and judge the GPUs that torch sees."""
    lines, trouble = try_backends(("shm", "gloo"), limit_s, ("--nproc", "2"))
    torch = next((line for line in lines if "torch" in line), {})
    yield from gpus(torch)
    yield from judge(("shm", "gloo"), lines, trouble)
    if len(torch.get("gpus", ())) > 1:
        yield from judge(("nccl",), *try_backends(("nccl",), limit_s, ("--nproc", "2")))


def hosts(flags: Sequence[str], limit_s: float) -> Findings:
    """Let one rank on each of several hosts do a collective together."""
    for finding in judge(("gloo",), *try_backends(("gloo",), limit_s, (*flags, "--nproc", "1"))):
        yield replace(finding, check="hosts")


def try_backends(
    backends: Sequence[str], limit_s: float, flags: Sequence[str]
) -> tuple[list[dict[str, Any]], str]:
    """Start ranks that try each backend (`dure.cli.doctor.rank`), with these flags of `dure run`.

    Returns:
        The lines of rank 0, and what else was written.
    """
    rank = ["-m", "dure.cli.doctor.rank", str(limit_s / 2), *backends]
    # A scheduler's variables would make two processes part of a larger job.
    unset = dict.fromkeys((*RANK_VARIABLES, "DURE_STORE_ADDR"))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dure.cli", "run", *flags, *rank],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env.child_environment({**QUIET_VARIABLES, **unset}),
            timeout=limit_s,
            check=False,
        )
        output, trouble = done.stdout, f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, trouble = error.stdout or b"", f"no answer within {limit_s:g} s: busy, or a hang"
    lines = output.decode(errors="replace").splitlines()
    words = "\n".join(line for line in lines if MARK not in line)[-1000:].strip()
    found = [json.loads(line.partition(MARK)[2]) for line in lines if MARK in line]
    return found, f"{trouble}: {words or 'no output'}"


def judge(backends: Sequence[str], lines: Sequence[Mapping[str, Any]], trouble: str) -> Findings:
    """Judge which backends work; those after one without an answer were not tried."""
    known = {line["backend"]: line for line in lines if "backend" in line}
    for backend in backends:
        name, line = f"{backend} collective", known.get(backend)
        if line is None:
            yield problem(name, trouble, "Try again on an idle machine, with --limit 60.")
            return
        if error := line.get("error"):
            yield problem(name, f"it fails: {error}", _ADVICE[backend])
        else:
            yield fine(name, f"{line['ranks']} ranks, {line['us']:.0f} us for 4 KiB")
        if "copies" in line:
            yield fine("copies", line["copies"])
