"""Workers of RPC that are killed at random moments: no call hangs, nothing leaks, others go on.

A program calls two workers that call each other: plainly, with references that are passed on, and
with backward passes through all three. At a random moment one of them is killed; what waits for it
must end, with the right value or with a `PeerLost` somewhere in its error. It then comes again
under its name.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dure import autograd, native, rpc
from dure.errors import DureError, PeerLost
from dure.rpc.current import current
from tests.rpc.gates import held
from tests.rpc.procs.rpc_workers import (
    Start,
    Worker,
    chain,
    double,
    fetch,
    gradient,
    keep,
    let_go,
    passed_on,
    weight,
)
from tests.waiting import PATIENCE_S, until

pytestmark = [
    pytest.mark.needs("engine"),
    pytest.mark.timeout(600),
]

NAMES = ["a", "b"]
LARGE = torch.arange(100_000.0)


def plain(to: str, other: str) -> None:
    assert rpc.rpc_sync(to, double, (21,)) == 42
    futures = [rpc.rpc_async(to, double, (LARGE,)) for _ in range(4)]
    for future in futures:
        assert torch.equal(future.wait(), 2 * LARGE)
    assert torch.equal(
        rpc.rpc_sync(to, chain, ([other], torch.ones(2, 4))), torch.full((2, 4), 16.0)
    )


def references(to: str, other: str) -> None:
    made = rpc.remote(to, double, (LARGE,))
    assert rpc.rpc_sync(other, passed_on, (made, to)) > 0
    assert torch.equal(rpc.rpc_sync(other, fetch, (made,)), 2 * LARGE)
    mine = rpc.RRef(LARGE)
    assert rpc.rpc_sync(to, passed_on, (mine, other)) > 0
    assert rpc.rpc_sync(to, keep, (rpc.remote(to, double, (1,)),)) > 0
    assert torch.equal(made.to_here(), 2 * LARGE)
    for name in (to, other):
        rpc.rpc_sync(name, let_go)


def backward(to: str, other: str) -> None:
    with autograd.context() as context:
        loss = rpc.rpc_sync(to, chain, ([other, to], torch.ones(2, 4) @ weight)).sum()
        autograd.backward(context, [loss])
        # 2 rows of ones, then three more weights of ones, in each of which a row sums to 4
        assert torch.equal(autograd.get_gradients(context)[weight], torch.full((4, 4), 128.0))
    assert rpc.rpc_sync(to, gradient, ([other],)).shape == (4, 4)


KINDS = [plain, references, backward]


# By its text, for an error that torch's futures or the answer of another worker have carried keeps
# nothing else: the errors of calls whose callee, owner or references are gone.
_LOST = re.compile(
    r"(worker '[ab]' \(id \d+\)|process \d+) is gone"
    r"|could not find destination: '[ab]'|never made, or its messages were lost"
)


def is_lost(error: Exception) -> bool:
    """Whether it says that a worker is gone, be it from afar."""
    return isinstance(error, PeerLost) or _LOST.search(str(error)) is not None


class Drill:
    """The program: three threads, each of which does one kind of work again and again."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.random = url, random.Random(seed)
        self.ended: Counter[str] = Counter()
        self.odd: list[BaseException] = []
        self.rounds = [0] * len(KINDS)
        self._over = threading.Event()
        logging.getLogger("dure.rpc").setLevel(
            logging.CRITICAL
        )  # records hold frames, and these memory
        Start(name="program", rank=0, url=url).init()
        self.workers = {name: self.start(name) for name in NAMES}
        self.threads = [
            threading.Thread(target=self._work, args=(number,)) for number in range(len(KINDS))
        ]

    def start(self, name: str) -> Worker:
        worker = Worker(Start(name=name, url=self.url))
        worker.joined()
        until(lambda: found(name) is not None, f"{name} to be known")
        return worker

    def _work(self, number: int) -> None:
        kind, names = KINDS[number], list(NAMES)
        while not self._over.is_set():
            names.reverse()
            try:
                kind(*names)
                self.ended[f"{kind.__name__}: done"] += 1
            except Exception as error:
                self.ended[f"{kind.__name__}: {type(error).__name__}"] += 1
                if not is_lost(error):
                    self.odd.append(error)
                self._over.wait(0.005)  # it comes again
            self.rounds[number] += 1

    def kill(self) -> None:
        """Kill one at a random moment; all threads end what they do; start it again."""
        time.sleep(self.random.random() * 0.03)  # the moment is what is drawn
        name = self.random.choice(NAMES)
        os.kill(self.workers[name].pid, signal.SIGKILL)
        before = list(self.rounds)
        self.workers[name].close()
        until(
            lambda: all(now > then for now, then in zip(self.rounds, before, strict=True)),
            lambda: f"all to go on: {before} {self.rounds} {self.ended}",
        )
        self.workers[name] = self.start(name)
        before = list(self.rounds)
        until(
            lambda: all(now > then + 1 for now, then in zip(self.rounds, before, strict=True)),
            lambda: f"all to work again: {before} {self.rounds} {self.ended}",
        )

    def left(self) -> dict[str, float]:
        """Return what this process has when nothing is under way and nothing is held."""
        for name in NAMES:
            rpc.rpc_sync(name, let_go)
        until(lambda: current().activity()[1] == 0, "calls to end")

        def nothing_held() -> bool:
            gc.collect()
            return not held(current())

        until(nothing_held, lambda: f"references to be freed: {held(current())}")
        info = rpc.api._rref_context_get_debug_info()
        native.heap_trim()
        return {
            "references": float(info["num_owner_rrefs"]) + float(info["num_forks"]),
            "contexts": autograd._get_debug_info()["num_autograd_contexts"],
            "passes": autograd._get_debug_info()["num_current_backward_passes"],
            "descriptors": psutil.Process().num_fds(),
            "taken": native.heap_taken(),
            "used": native.heap_usage()[0],
        }

    def pause(self, then: Callable[[], Any]) -> Any:
        """Return what `then` returns while no thread works."""
        self._over.set()
        for thread in self.threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self.threads), "a thread hangs"
        try:
            return then()
        finally:
            self._over.clear()
            self.threads = [
                threading.Thread(target=self._work, args=(number,)) for number in range(len(KINDS))
            ]

    def run(self, kills: int) -> None:
        for thread in self.threads:
            thread.start()
        for _ in range(kills):
            self.kill()
            assert not self.odd, repr(self.odd)

    def close(self) -> None:
        self._over.set()
        for worker in self.workers.values():
            worker.close()
        for thread in self.threads:
            if thread.ident is not None:
                thread.join(PATIENCE_S)
        rpc.shutdown(graceful=False)
        logging.getLogger("dure.rpc").setLevel(logging.NOTSET)
        native.heap_trim()  # what was given to the dead is taken back when memory is next asked for


def found(name: str) -> object:
    try:
        return current().find(name)
    except DureError:
        return None


@pytest.mark.parametrize("kills", [9, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, *[pytest.param(s, marks=pytest.mark.slow) for s in (1, 2)]])
def test_workers_that_are_killed_at_random_moments(seed: int, kills: int, tmp_path: Path) -> None:
    drill = Drill(f"file://{tmp_path}/meeting", seed)
    try:
        drill.run(2)
        before = drill.pause(drill.left)
        drill.run(kills)
        after = drill.pause(drill.left)
    finally:
        drill.close()
    assert drill.ended["backward: done"]
    for what in ("references", "contexts", "passes"):
        assert after[what] == 0, (what, after)
    # two workers may be connected by sockets, where they were not: four descriptors each
    assert after["descriptors"] <= before["descriptors"] + 8, (before, after)
    assert after["taken"] == 0, (before, after)
    assert after["used"] <= before["used"] + (1 << 20), (
        before,
        after,
    )  # two messages, not one each
