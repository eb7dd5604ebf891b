"""The default group: made once, left at the end of a block, and never half made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import dure as dist
from dure.comm import init
from dure.errors import UsageError
from tests.thread_ranks import on_ranks
from tests.waiting import listening, until


@on_ranks(2)
def test_destroy_of_the_world_destroys_every_group(rank):
    group = dist.new_group()
    dist.barrier()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    for g in (group, None):
        with pytest.raises(UsageError):
            dist.barrier(g)


def test_a_host_without_the_engine_is_warned_that_it_uses_gloo(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(init, "native_available", lambda: (False, "it has protocol 9"))
    monkeypatch.delenv("DURE_BACKEND", raising=False)
    found: Any = SimpleNamespace(same_process=False, same_host=True, rank=0)
    with pytest.warns(dist.PerformanceWarning, match="by gloo.*: it has protocol 9"):
        assert init._default_backend(found)[0] == "gloo"
    found.rank = 1  # one warning per job
    assert init._default_backend(found)[0] == "gloo"


@pytest.mark.parametrize(
    ("backend", "gpus", "used"),
    [
        ("shm", "01", "cpu:shm,cuda:nccl"),
        ("shm", "00", "shm"),
        ("nccl", "01", "nccl"),
        ("fake", "01", "fake"),
        ("cpu:gloo,cuda:gloo", "01", "cpu:gloo,cuda:gloo"),
    ],
)
def test_nccl_is_added_to_the_default_if_each_rank_has_a_gpu_of_its_own(backend, gpus, used):
    found: Any = SimpleNamespace(
        members=[SimpleNamespace(host_id="a", gpus=(name,)) for name in gpus]
    )
    assert init._with_nccl(backend, found) == used


@on_ranks(2)
def test_init_twice_raises(rank):
    with pytest.raises(UsageError):
        dist.init_process_group("threads")


def test_unknown_backend_raises_before_anyone_is_waited_for():
    with pytest.raises(UsageError):
        dist.init_process_group("carrier-pigeon", rank=0, world_size=2, store=dist.HashStore())
    assert not dist.is_initialized()


def test_a_rank_whose_group_cannot_be_created_leaves_the_port_free(
    port: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DURE_BACKEND", "carrier-pigeon")
    for _ in range(2):
        with pytest.raises(UsageError, match="carrier-pigeon"):
            dist.init_process_group(None, f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        until(lambda: not listening(port), "the end of the store's server")
    assert not dist.is_initialized()


def test_process_group_context_manager_leaves_and_does_not_hide_an_error():
    def divide(by: int) -> float:
        with dist.process_group("threads", store=dist.HashStore(), rank=0, world_size=1) as group:
            assert dist.is_initialized()
            return group.size() / by

    assert divide(1) == 1
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError):
        divide(0)
    assert not dist.is_initialized()
