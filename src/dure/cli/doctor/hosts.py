"""Other hosts: reached by ssh, with the same versions and time, and by connections both ways.

The doctor starts itself there over ssh with the hidden option `--answer`, and speaks with it in
lines of JSON over that connection:

1. The answerer says who it is: versions, and a port at which it listens for one connection.
2. The asker sends a line three times; the answerer replies with its time of day. The quickest round
   trip bounds how far the clocks are apart.
3. The asker connects to the answerer's port, and tells it to connect to a port of the asker's.

Both listeners take one connection of no content, on one address each, and are closed at once.
"""

from __future__ import annotations

import json
import platform
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import IO, Any  # Any: what JSON holds

from dure.cli.doctor import checks, collectives, machine
from dure.cli.doctor.checks import Finding, Findings, Level, fine, problem, warning
from dure.errors import UsageError
from dure.launch.clusters.meeting import ssh_name
from dure.placement.nodes import expand_hosts
from dure.store.address import interface_to

_LIMIT_S = 15.0
_CONNECT_S = 3.0
_AT_ONCE = 256
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")


def examine(
    hosts: str, options: Sequence[str], *, collective: bool, limit_s: float
) -> list[Finding]:
    """Ask each of the hosts (`node[1-4],other`), and let them try a collective together."""
    try:
        known = expand_hosts(hosts)
    except ValueError as error:
        raise UsageError("the list of hosts cannot be read", seen=str(error)) from None
    with ThreadPoolExecutor(min(len(known), _AT_ONCE)) as pool:
        answers = list(pool.map(partial(ask, options=options), known))
    found = [replace(f, host=h) for h, told in zip(known, answers, strict=True) for f in told]
    if collective and not any(f.check == "ssh" and f.level is Level.PROBLEM for f in found):
        flags = ["--hosts", hosts, *(f"--ssh-option={o}" for o in options), "--nproc", "1"]
        tried = collectives.judge(collectives.try_backends(("gloo",), limit_s, flags))
        found += [replace(finding, host=hosts) for finding in tried]
    return found


def packages() -> dict[str, str]:
    """Return the versions that must be the same on all hosts."""
    installed = machine.packages()
    names = ("dure", "torch", "pyzmq", "msgspec")
    found = {name: installed[name] for name in names if name in installed}
    python = ".".join(map(str, sys.version_info[:2]))
    return found | {"python": python, "machine": platform.machine()}


def ask(host: str, options: Sequence[str] = (), command: Sequence[str] = ()) -> list[Finding]:
    """Say whether a job can have ranks on `host`; `command` starts the answerer in place of ssh."""
    try:
        address = socket.gethostbyname(ssh_name(host, options))
    except OSError:
        address = ""
    there = [sys.executable, "-m", "dure.cli", "doctor", "--answer", address or "127.0.0.1"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command or (*_SSH, *options, "--", host, shlex.join(there)),
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
    )
    watch = threading.Timer(_LIMIT_S, process.kill)
    watch.start()
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        return list(_converse(host, address, process.stdin, process.stdout))
    except (OSError, ValueError, KeyError, TypeError):
        process.kill()
        words = process.communicate()[1].strip()
        return [
            problem(
                "ssh",
                f"cannot be asked: {words[-500:] or 'no answer'}",
                f"`ssh {host} true` must work without a password (ssh-copy-id, an agent), and "
                "Dure must be installed there under the same path.",
            )
        ]
    finally:
        watch.cancel()
        process.kill()
        process.communicate()


def _converse(host: str, address: str, to: IO[str], answers: IO[str]) -> Findings:
    def say(**content: object) -> dict[str, Any]:
        print(json.dumps(content), file=to, flush=True)
        return json.loads(answers.readline())

    who: dict[str, Any] = json.loads(answers.readline())
    yield fine("ssh", f"answers, at {address or 'an address that only ssh knows'}")
    yield checks.same_versions(packages(), who["packages"], host)
    trips: list[tuple[float, float]] = []
    for _ in range(3):
        start = time.time()
        theirs = float(say()["time"])
        trip = time.time() - start
        trips.append((trip, theirs - (start + trip / 2)))
    best_s, ahead_s = min(trips)
    yield checks.clock_difference(ahead_s, best_s / 2)
    if not address:
        advice = f"Add {host} to /etc/hosts or the name server: ssh alone knows it."
        yield warning("connections", "its name stands for no address here", advice)
        return
    yield checks.connection(_connects(address, int(who["port"])), "from here to it")
    mine = interface_to(address) or "127.0.0.1"
    with socket.create_server((mine, 0)) as server:  # the kernel accepts: nobody needs to
        told = say(address=mine, port=server.getsockname()[1])
    yield checks.connection(bool(told["reached"]), "from it to here")


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def answer(bind: str) -> None:
    """Play the answerer's part, listening at the address `bind`."""
    try:
        with socket.create_server((bind, 0)) as server:
            port = server.getsockname()[1]
            print(json.dumps({"packages": packages(), "port": port}), flush=True)
            for line in sys.stdin:
                wanted = json.loads(line)
                if "port" in wanted:
                    told = {"reached": _connects(str(wanted["address"]), int(wanted["port"]))}
                else:
                    told = {"time": time.time()}
                print(json.dumps(told), flush=True)
    except OSError as error:
        raise UsageError("cannot listen", seen=f"{bind}: {error}") from None
