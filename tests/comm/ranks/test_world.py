"""How code finds its world: threads of a program, thread-ranks, and autograd's threads."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import dure as dist
from dure.comm import init
from dure.comm.aliases import _resolve_process_group
from dure.comm.world import World, group_named, new_world
from dure.errors import UsageError
from dure.testing import run_ranks
from tests.thread_ranks import on_ranks
from tests.waiting import PATIENCE_S


def test_a_thread_that_a_program_starts_sees_the_process_world():
    seen = []
    with dist.process_group("threads", store=dist.HashStore(), rank=0, world_size=1):
        thread = threading.Thread(target=lambda: seen.append(dist.get_world_size()))
        thread.start()
        thread.join()
    assert seen == [1]


def test_a_thread_rank_sees_only_its_own_world():
    with dist.process_group("threads", store=dist.HashStore(), rank=0, world_size=1):

        def body(rank):
            return dist.get_rank(), dist.get_world_size()

        assert run_ranks(3, body) == [(r, 3) for r in range(3)]
        assert dist.get_world_size() == 1


@on_ranks(1)
def test_groups_are_found_by_name_and_the_default_one_as_0(rank):
    default, other = dist.group.WORLD, dist.new_group([0])
    for name in ("0", default.group_name):
        assert _resolve_process_group(name) is default
    assert _resolve_process_group(other.group_name) is other
    with pytest.raises(UsageError):
        _resolve_process_group("nosuch")
    assert group_named("0", "all_reduce") is default


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
        dist.init_process_group("threads", init_method=url, world_size=1, rank=0)
        threads[0].join()
        assert found == [world.default]
        dist.destroy_process_group()
