"""The store of a group that is being made: what its waits notice, also later."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from dure import native
from dure.comm import creation
from dure.comm.creation import GroupSpec, create_groups
from dure.comm.world import World
from dure.errors import Desync, RendezvousError
from dure.store import HashStore
from dure.store.builds import Build
from tests.waiting import PATIENCE_S, until

LONG = timedelta(seconds=PATIENCE_S)


def test_ranks_of_the_plugin_with_different_builds_make_no_group(monkeypatch: pytest.MonkeyPatch):
    shared, mine = HashStore(), threading.local()
    monkeypatch.setattr(creation, "own_build", lambda: Build(10, mine.version))
    spec = GroupSpec(name="g", global_ranks=(0, 1), backend="gloo", timeout=LONG)

    def create(rank: int) -> str:
        mine.version = f"0.2.{rank}"
        with pytest.raises(RendezvousError) as caught:
            create_groups(World(), shared, rank, [spec])
        return caught.value.seen or ""

    with ThreadPoolExecutor(2) as pool:
        for seen in pool.map(create, range(2)):
            assert "0.2.0 (protocol 10): rank 0 (pid " in seen
            assert "0.2.1 (protocol 10): rank 1 (pid " in seen


def test_ranks_of_which_only_some_have_the_engine_are_told_so(monkeypatch: pytest.MonkeyPatch):
    shared, mine = HashStore(), threading.local()
    monkeypatch.setattr(native, "available", lambda: (not mine.reason, mine.reason))

    def create(rank: int) -> str:
        mine.reason = "" if rank == 0 else "it is not built"
        backend = "gloo" if rank else "cpu:gloo"
        spec = GroupSpec(name="g", global_ranks=(0, 1), backend=backend, timeout=LONG)
        with pytest.raises(RendezvousError) as caught:
            create_groups(World(), shared, rank, [spec])
        assert caught.value.what == "the ranks run different builds of Dure"
        return caught.value.seen or ""

    with ThreadPoolExecutor(2) as pool:
        for seen in pool.map(create, range(2)):
            assert "with the native engine: global ranks [0]" in seen
            assert "without the native engine (it is not built): global ranks [1]" in seen


def test_sockets_of_gloo_close_with_a_group_that_was_not_made():
    shared = HashStore()

    def create(rank: int) -> None:
        spec = GroupSpec(
            name="g", global_ranks=(0, 1), backend=("gloo", "cpu:gloo")[rank], timeout=LONG
        )
        with pytest.raises(Desync):
            create_groups(World(), shared, rank, [spec])

    before = len(os.listdir("/proc/self/fd"))
    gc.disable()  # the errors that were raised are part of circles, the sockets must not be
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(create, range(2)))
        until(lambda: len(os.listdir("/proc/self/fd")) == before, "sockets to be closed")
    finally:
        gc.enable()
