"""What real networks do to hosts: names that mean loopback, second networks, firewalls.

Hosts are those of `tests.comm.namespace_hosts`: each has its own network, host name, processes and
mounts, so that all of this changes nothing outside of them.
"""

import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.comm.forked_ranks import Ranks
from tests.comm.namespace_hosts import Host, variables_of, why_not

STORE_PORT = 29500
SECOND = "10.213.8.{}"


@functools.cache
def why_no_firewall() -> str:
    """Return why hosts with firewalls cannot be made here; empty if they can."""
    missing = "" if shutil.which("iptables") else "iptables not found (Debian: iptables)"
    return why_not() or missing


def inside(host: Host, *words: str) -> str:
    """Run a program on a host, as root; return what it has printed."""
    enter = ["nsenter", f"--target={host.inner_pid}", "--net", "--uts", "--mount"]
    done = subprocess.run([*enter, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return done.stdout


def give_names(made: Sequence[Host], folder: Path) -> None:
    """Give each host the names of all, its own as Debian does: 127.0.1.1."""
    for host in made:
        lines = ["127.0.0.1 localhost", f"127.0.1.1 {host.name}"]
        lines += [f"{other.address} {other.name}" for other in made if other is not host]
        file = folder / f"hosts-{host.name}"
        file.write_text("".join(f"{line}\n" for line in lines))
        inside(host, "mount", "--bind", str(file), "/etc/hosts")


def add_second_network(made: Sequence[Host]) -> list[str]:
    """Give each host a second interface, eth1, on a network of its own; return the addresses."""
    first, addresses = made[0], [SECOND.format(number + 1) for number in range(len(made))]
    assert len(made) == 2, "one cable, without a bridge"
    peer = ["peer", "name", "eth1", "netns", str(made[1].inner_pid)]
    inside(first, "ip", "link", "add", "eth1", "type", "veth", *peer)
    for host, address in zip(made, addresses, strict=True):
        inside(host, "ip", "addr", "add", f"{address}/24", "dev", "eth1")
        inside(host, "ip", "link", "set", "eth1", "up")
    return addresses


def use_ipv6_only(made: Sequence[Host]) -> None:
    """Take the hosts' IPv4 addresses away, and give them IPv6 ones."""
    for number, host in enumerate(made):
        inside(host, "ip", "addr", "flush", "dev", "eth0", "scope", "global")
        host.address = f"fd77::{number + 1}"
        inside(host, "ip", "addr", "add", f"{host.address}/64", "dev", "eth0", "nodad")


def set_mtu(made: Sequence[Host], nbytes: int) -> None:
    """Let the hosts send packets of at most so many bytes."""
    for host in made:
        inside(host, "ip", "link", "set", "eth0", "mtu", str(nbytes))


_SHIFT = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += 3600;
    return failed;
}
time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds) *seconds = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


def shift_clock(host: Host, folder: Path) -> None:
    """Let the host's calendar be an hour fast, for programs that use the C library."""
    source, library = folder / "shift.c", folder / "shift.so"
    source.write_text(_SHIFT)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    host.variables["LD_PRELOAD"] = str(library)


def received(host: Host, interface: str) -> int:
    """Return how many bytes a host has received through an interface."""
    return int(inside(host, "cat", f"/sys/class/net/{interface}/statistics/rx_bytes"))


def close_ports(host: Host, *, but: Sequence[int], refuse: bool = False) -> None:
    """Let no connection in, except to the ports `but`; what exists goes on.

    Args:
        host: The host with the firewall.
        but: The ports that stay open.
        refuse: Answer that the port is closed; else do not answer, as most firewalls.
    """
    rule = ("iptables", "-A", "INPUT")
    inside(host, *rule, "-i", "lo", "-j", "ACCEPT")
    inside(host, *rule, "-m", "state", "--state", "ESTABLISHED,RELATED", "-j", "ACCEPT")
    for port in but:
        inside(host, *rule, "-p", "tcp", "--dport", str(port), "-j", "ACCEPT")
    end = ("REJECT", "--reject-with", "tcp-reset") if refuse else ("DROP",)
    inside(host, *rule, "-p", "tcp", "-j", *end)


def stop_hearing(host: Host) -> None:
    """Cut the host's cable in one direction: it sends, and receives nothing."""
    inside(host, "iptables", "-A", "INPUT", "-i", "eth0", "-j", "DROP")


def lose_packets(made: Sequence[Host], share: float) -> None:
    """Let each host lose this share of the packets that come to it, at random."""
    for host in made:
        words = ["-m", "statistic", "--mode", "random", "--probability", str(share)]
        inside(host, "iptables", "-A", "INPUT", "-i", "eth0", *words, "-j", "DROP")


@contextmanager
def ranks_on(
    made: Sequence[Host],
    folder: Path,
    fn: Callable[..., object],
    *args: object,
    each: int = 1,
    **variables: str,
) -> Iterator[Ranks]:
    """Run `fn(slot, variables, *args)` on `each` ranks of every host; the first has the store."""
    with forked_ranks(made, each, folder) as ranks:
        ranks.start(fn, variables_of(made, each, folder / "key") | variables, *args)
        yield ranks


@contextmanager
def forked_ranks(made: Sequence[Host], each: int, folder: Path) -> Iterator[Ranks]:
    """Fork `each` ranks on every host, which do nothing yet."""
    folder.mkdir(exist_ok=True)
    inside = [host.inner_pid for host in made for _ in range(each)]
    with Ranks(len(inside), folder, inside=inside) as ranks:
        yield ranks


def set_variables(rank: int, variables: dict[str, str]) -> None:
    """Set the environment of a rank that was forked into its host."""
    os.environ |= variables | {"RANK": str(rank)}
    os.environ["LOCAL_RANK"] = str(rank % int(variables["LOCAL_WORLD_SIZE"]))
