"""The default group while it comes about."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import dure
from dure.comm import init
from dure.comm.world import World, new_world
from tests.waiting import PATIENCE_S


class Watched:
    """The lock of a world that begins; tells when another thread wants it."""

    def __init__(self) -> None:
        self.owner, self.wanted = threading.get_ident(), threading.Event()
        self.real = threading.RLock()

    def __enter__(self) -> None:
        if threading.get_ident() != self.owner:
            self.wanted.set()
        self.real.acquire()

    def __exit__(self, *error: object) -> None:
        self.real.release()


def test_a_thread_that_asks_for_a_group_that_comes_about_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, found = init.create_groups, list[Any]()

    def create_slowly(world: World, *args: Any) -> Any:
        made = create(world, *args)
        asks = threading.Thread(target=lambda: found.append(world.need_default()))
        asks.start()
        assert watched.wanted.wait(PATIENCE_S), "it does not wait"
        threads.append(asks)
        return made

    threads: list[threading.Thread] = []
    with new_world() as world:
        watched: Any = Watched()
        monkeypatch.setattr(world, "beginning", watched)
        monkeypatch.setattr(init, "create_groups", create_slowly)
        url = f"file://{tmp_path}/meeting"
        dure.init_process_group("threads", init_method=url, world_size=1, rank=0)
        threads[0].join()
        assert found == [world.default]
        dure.destroy_process_group()
