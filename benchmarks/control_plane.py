"""What the control plane of a job costs per host: requests, bytes, time to settle.

    python benchmarks/control_plane.py [--hosts 4 16 64 256] [--seconds 3]

A coordinator serves real loopback connections, encrypted as in a job; all agents are in a second
process, each with its two threads. They join, start a round of 8 ranks per host, wait, and then all
report its end at the same moment. Requests and bytes are counted by the coordinator, before
encryption.
"""

from __future__ import annotations

import argparse
import json
import resource
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from typing import ClassVar

from dure.launch.agent.control import CoordinatorClient
from dure.launch.agent.coordinator import Coordinator
from dure.launch.agent.events import Ended, Joined, Leave, RunRound, Settings
from dure.launch.agent.membership import HostMember, HostMembership, boottime
from dure.launch.agent.messages import Admitted, Answer, Heartbeat, JoinRequest, Message
from dure.launch.spec import Exit, RankResult
from dure.store.address import resolve
from dure.store.board import Answer as ClientAnswer
from dure.store.key import mint
from dure.store.listener import listen
from dure.store.server import StoreServer
from dure.store.wire import StoreRequest

NPROC, PATIENCE_S = 8, 60.0


class Counting(Coordinator):
    """A coordinator that counts."""

    counts: ClassVar[Counter[str]] = Counter()

    def handle(self, client: bytes, request: StoreRequest, now: float) -> list[ClientAnswer]:
        """Count a request."""
        if request.op == "control":
            self.counts["requests"] += 1
            self.counts["bytes"] += len(request.values[0])
        return self._counted(super().handle(client, request, now))

    def expire(self, now: float) -> list[ClientAnswer]:
        """Count answers that had to wait."""
        return self._counted(super().expire(now))

    def _counted(self, answers: list[ClientAnswer]) -> list[ClientAnswer]:
        self.counts["bytes"] += sum(len(v) for _, reply in answers for v in reply.values)
        return answers


class Timed(CoordinatorClient):
    """A connection that measures how long renewals take."""

    worst_s = 0.0

    def ask(self, message: Message, timeout_s: float = 0.0) -> Answer:
        """Put a request."""
        began = time.monotonic()
        answer = super().ask(message, timeout_s)
        if isinstance(message, Heartbeat):
            Timed.worst_s = max(Timed.worst_s, time.monotonic() - began)
        return answer


def play(
    number: int, endpoint: str, key: bytes, settings: Settings, steps: dict[str, threading.Barrier]
) -> None:
    """Be one agent."""
    joined = Joined(f"agent-{number:06}", f"node-{number:04}", NPROC, address="10.0.0.1")
    joining = JoinRequest(joined, b"%016d" % number, settings, elastic=False)
    control, sent = Timed(endpoint, key, PATIENCE_S), boottime()
    answer = control.ask(joining)
    assert isinstance(answer, Admitted)
    member = HostMember(control, HostMembership(joined, joining.nonce, answer.settings, sent))

    news = select.poll()  # there are more descriptors than `select.select` can name
    news.register(member.fd, select.POLLIN)

    def wait_for(kind: type) -> object:
        while not isinstance(action := member.action(), kind):
            news.poll(1000 * PATIENCE_S)
        return action

    action = wait_for(RunRound)
    assert isinstance(action, RunRound)
    steps["started"].wait()
    steps["ended"].wait()
    part = action.round
    ranks = tuple(
        RankResult(rank=part.first_rank + k, host=joined.host, pid=1000 + k, exit=Exit(code=0))
        for k in range(NPROC)
    )
    member.report(Ended(member.agent, part.number, ranks, well=True))
    wait_for(Leave)
    assert not member.gone
    steps["settled"].wait()
    member.leave()
    member.close()


def agents(words: argparse.Namespace) -> None:
    """Run all agents; print the times."""
    count = words.agents
    settings = Settings(min_hosts=count, max_hosts=count, run_id="job")
    steps = {name: threading.Barrier(count + 1) for name in ("started", "ended", "settled")}
    key, began = bytes.fromhex(words.key), time.monotonic()
    threads = [
        threading.Thread(target=play, args=(number, words.endpoint, key, settings, steps))
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    steps["started"].wait()
    started_s = time.monotonic() - began
    time.sleep(words.seconds)
    began = time.monotonic()
    steps["ended"].wait()
    steps["settled"].wait()
    settled_s = time.monotonic() - began
    for thread in threads:
        thread.join()
    print(json.dumps({"started_s": started_s, "settled_s": settled_s, "renewal_s": Timed.worst_s}))


def raise_descriptors() -> None:
    """Let this process have as many descriptors as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def measure(count: int, seconds: float) -> dict[str, float]:
    """Return the requests and bytes per host, and the times."""
    key = mint()
    settings = Settings(min_hosts=count, max_hosts=count, run_id="job")
    state = JoinRequest(Joined("", "", 0), b"", settings, elastic=False).state("job")
    Counting.counts = Counter()
    server = StoreServer(listen(resolve("127.0.0.1", 0)), key, board=Counting(state))
    endpoint = f"tcp://127.0.0.1:{server.port}"
    command = [sys.executable, __file__, "--agents", str(count), "--endpoint", endpoint]
    command += ["--key", key.raw.hex(), "--seconds", str(seconds)]
    found = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    server.stop()
    each = {name: total / count for name, total in Counting.counts.items()}
    return {**each, **found}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[4, 16, 64, 256])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--agents", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    parser.add_argument("--key", help=argparse.SUPPRESS)
    words = parser.parse_args()
    raise_descriptors()
    if words.agents:
        agents(words)
        return
    print("| Hosts | Requests per host | Bytes per host | Start | End | Longest renewal |")
    print("| --- | --- | --- | --- | --- | --- |")
    for count in words.hosts:
        found = measure(count, words.seconds)
        times = (found[name] for name in ("started_s", "settled_s", "renewal_s"))
        cells = [str(count), f"{found['requests']:.1f}", f"{found['bytes']:.0f}"]
        print(f"| {' | '.join([*cells, *(f'{took:.2f} s' for took in times)])} |", flush=True)


if __name__ == "__main__":
    main()
