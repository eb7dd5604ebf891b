"""Tear-down over hosts: from the death of a rank to the end of all ranks and launchers (root only).

    python benchmarks/hosts_end.py [--hosts 2] [--ranks-each 2] [--rounds 5] [--ssh]

Hosts are network namespaces of this machine (`tests/comm/namespace_hosts.py`), each with a
`dure run` of its own; with `--ssh` one `dure run --hosts` starts them through an sshd in each. The
program sleeps, or is in an endless chain of all_reduces (`busy`). One rank of the last host is
killed; ends are those that the kernel reports (pidfd), so nothing is asked of the processes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from dure.cli.machine import busy_cores
from tests.comm.namespace_hosts import Host, hosts, why_not
from tests.launch.procs.ssh_hosts import front, ssh_hosts
from tests.launch.procs.ssh_hosts import why_not as why_no_ssh

PORT = 29400
LIMIT_S = 60.0
PROGRAMS = {
    "asleep": "import os, signal, torch\nopen(f'{F}/{os.environ[\"RANK\"]}', 'w').close()\n"
    "signal.pause()\n",
    "busy": "import os, torch, dure\ndure.init_process_group()\nt = torch.ones(1000)\n"
    "dure.all_reduce(t)\nopen(f'{F}/{os.environ[\"RANK\"]}', 'w').close()\n"
    "while True:\n    dure.all_reduce(t)\n",
}


def ranks_of(host: Host) -> dict[int, int]:
    """Return the ranks on a host, each with its process, as this process sees it."""
    found: dict[int, int] = {}
    for line in host.inside():
        with contextlib.suppress(OSError, StopIteration):
            variables = Path(f"/proc/{line.split()[0]}/environ").read_bytes().split(b"\0")
            rank = next(v for v in variables if v.startswith(b"RANK="))
            found[int(rank[5:])] = int(line.split()[0])
    return found


def ends(pids: Sequence[int], kill: int) -> list[float]:
    """Kill a process; return how long after that each of `pids` ended."""
    fds = [os.pidfd_open(pid) for pid in pids]
    began = time.monotonic()
    os.kill(kill, signal.SIGKILL)
    ended: dict[int, float] = {}
    while len(ended) < len(fds) and time.monotonic() < began + LIMIT_S:
        for fd in select.select([fd for fd in fds if fd not in ended], [], [], 1.0)[0]:
            ended[fd] = time.monotonic() - began
    for fd in fds:
        os.close(fd)
    return [ended.get(fd, LIMIT_S) for fd in fds]


def measure(
    made: list[Host],
    folder: Path,
    start: Callable[[], list[subprocess.Popen[str]]],
    ranks_each: int,
) -> tuple[float, float]:
    """Run a job, kill a rank of its last host; return the last end of a rank, and of a launcher."""
    for path in folder.glob("[0-9]*"):
        path.unlink()
    launchers = start()
    deadline = time.monotonic() + LIMIT_S
    while len(list(folder.glob("[0-9]*"))) < len(made) * ranks_each:
        if time.monotonic() > deadline:
            sys.exit("the job does not start")
        time.sleep(0.01)
    ranks = [pid for host in made for pid in ranks_of(host).values()]
    others = [process.pid for process in launchers]
    times = ends([*ranks, *others], max(ranks_of(made[-1]).items())[1])
    for launcher in launchers:
        launcher.communicate()
    return max(times[: len(ranks)]), max(times[len(ranks) :])


@contextlib.contextmanager
def starters(
    args: argparse.Namespace, folder: Path
) -> Iterator[tuple[list[Host], Callable[[str], list[subprocess.Popen[str]]]]]:
    """Make the hosts; yield them, and what starts a program's job."""
    key = folder / "key"
    key.touch(0o600)
    key.write_bytes(os.urandom(32))
    flags = ["--nproc", str(args.ranks_each)]
    if args.ssh:
        with ssh_hosts(args.hosts, folder / "ssh") as (made, config):
            nodes = ",".join(host.name for host in made)
            yield made, lambda program: [front(made[0], config, nodes, [*flags, program])]
        return
    with hosts(args.hosts) as made:
        words = ["-m", "dure.cli", "run", "--nnodes", str(args.hosts), *flags]
        words += ["--rdzv-endpoint", f"{made[0].address}:{PORT}"]
        variables = {"DURE_JOB_KEY_FILE": str(key), "OMP_NUM_THREADS": "1"}
        yield made, lambda program: [host.start([*words, program], variables) for host in made]


def main() -> None:
    """Make the hosts, run the jobs, print medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-each", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ssh", action="store_true", help="start them over ssh")
    args = parser.parse_args()
    if why := why_no_ssh() if args.ssh else why_not():
        sys.exit(f"cannot make hosts here: {why}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "ssh").mkdir()
        with starters(args, folder) as (made, start):
            print(f"{args.hosts} hosts x {args.ranks_each} ranks, busy cores {busy_cores():.1f}")
            for what, text in PROGRAMS.items():
                program = folder / f"{what}.py"
                program.write_text(f"F = {name!r}\n{text}")
                found = [
                    measure(made, folder, lambda p=str(program): start(p), args.ranks_each)
                    for _ in range(args.rounds)
                ]
                for who, seconds in zip(
                    ("rank", "launcher"), zip(*found, strict=True), strict=True
                ):
                    print(
                        f"  {what:7} last {who:8} median {statistics.median(seconds):.2f} s, "
                        f"{min(seconds):.2f} to {max(seconds):.2f}"
                    )


if __name__ == "__main__":
    main()
