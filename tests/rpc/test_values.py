"""Values that references stand for: kept errors, and what runs when a value ends."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable

import pytest

from dure.errors import RpcError
from dure.rpc import api
from dure.rpc.references import Action, Message, References
from tests.rpc.gates import Cluster, who
from tests.waiting import until


class Kept:
    alive: Callable[[], object]


def keep_and_fail() -> None:
    kept = Kept()
    Kept.alive = weakref.ref(kept)
    raise ValueError("kept")


def test_an_error_kept_for_others_names_its_function_and_keeps_no_frames(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL, "dure.rpc")  # records hold frames
    with Cluster(1) as cluster, cluster.on(0):
        ref = api.remote("worker0", keep_and_fail)
        for _ in range(2):
            with pytest.raises(ValueError, match="kept") as raised:
                ref.local_value()
            assert "in keep_and_fail" in vars(raised.value)["remote_traceback"]
        # The thread that has run it may still be about to leave the frames that hold the error.
        until(lambda: gc.collect() >= 0 and Kept.alive() is None, "the frames to end")


def test_a_finalizer_that_runs_in_the_middle_of_a_step_may_not_call() -> None:
    """Python runs those of circles wherever memory is asked for: they would wait for themselves."""
    with Cluster(2) as cluster, cluster.on(0) as agent, agent.lock:
        for call in (api.rpc_async, api.rpc_sync):
            with pytest.raises(RpcError, match="finalizer"):
                call("worker1", who)


def test_reports_about_references_are_handled_under_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several threads receive: the tables are changed by one at a time, in the order of arrival."""
    was_free: list[bool] = []
    heard = References.heard

    def watched(self: References, sender: int, message: Message) -> list[Action]:
        lock = next(each for each in cluster.agents if each.me.id == self.me).lock

        def try_lock() -> None:
            was_free.append(lock.acquire(blocking=False))
            if was_free[-1]:
                lock.release()

        other = threading.Thread(target=try_lock)
        other.start()
        other.join()
        return heard(self, sender, message)

    monkeypatch.setattr(References, "heard", watched)
    with Cluster(2) as cluster, cluster.on(0):
        assert api.remote("worker1", who).to_here() == ("worker1", 0)
        until(lambda: was_free, "a report")
        assert not any(was_free)
