"""What `init_rpc` and its like refuse at once, and what they leave behind where they fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dure import rpc
from dure.errors import UsageError
from dure.rpc import api
from dure.rpc.agent import RpcAgent
from dure.rpc.peers import MOST_IDS
from dure.rpc.remote_module import RemoteModule
from dure.store import HashStore
from tests.rpc.cluster import LocalTransport
from tests.rpc.gates import Cluster
from tests.waiting import until


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.fix
    return caught.value.what


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"name": 5}, "name must be"),
        ({"name": b"w"}, "name must be"),
        ({"name": None}, "name must be"),
        ({"rank": 1.0}, "rank must be"),
        ({"rank": "0"}, "rank must be"),
        ({"rank": True}, "rank must be"),
        ({"world_size": True}, "world_size must be"),
        ({"rank": MOST_IDS}, "the rank is too large"),
        ({"rank": 2**40, "world_size": None}, "the rank is too large"),
        ({"world_size": 1.5}, "world_size must be"),
        ({"store": 5}, "store must be"),
    ],
)
def test_no_place_in_a_world(arguments: dict[str, Any], what: str) -> None:
    place: dict[str, Any] = {"name": "w", "rank": 0, "world_size": 1, "store": HashStore()}
    assert what in refused(lambda: rpc.init_rpc(**place | arguments))
    assert not rpc._is_current_rpc_agent_set()


@pytest.mark.parametrize("seconds", [-1, float("nan"), "x", None, True])
def test_no_timeout(seconds: Any) -> None:
    with Cluster(1) as cluster, cluster.on(0) as agent:
        assert "0 or more seconds" in refused(lambda: api._set_rpc_timeout(seconds))  # pyright: ignore
        assert "0 or more seconds" in refused(lambda: rpc.shutdown(timeout=seconds))
        assert not agent.closed


def test_no_tensor_and_no_place_for_a_module() -> None:
    not_one: Any = [1]
    assert "must be a tensor" in refused(lambda: rpc.share(not_one))
    with Cluster(1) as cluster, cluster.on(0):
        for where in (None, 5, b"worker0/cpu"):
            device: Any = where
            refused(lambda device=device: RemoteModule(device, torch.nn.Linear, (1, 1)))


@pytest.mark.parametrize("graceful", [True, False])
def test_who_leaves_together_with_the_others_need_not_tell_them(
    graceful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_to_all, plain = list[bool](), LocalTransport.close

    def close(self: LocalTransport, known: bool = False) -> None:
        known_to_all.append(known)
        plain(self, known)

    monkeypatch.setattr(LocalTransport, "close", close)
    with Cluster(2) as cluster:
        cluster.everywhere(lambda _: rpc.shutdown(graceful))
        assert known_to_all == [graceful] * 2


@pytest.mark.needs("engine")
def test_what_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(_: RpcAgent) -> None:
        raise ArithmeticError

    monkeypatch.setattr(RpcAgent, "start", fail)
    before = set(threading.enumerate())
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/meeting")
    with pytest.raises(ArithmeticError):
        rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=options)
    until(lambda: not set(threading.enumerate()) - before, "threads to end")
    assert not rpc._is_current_rpc_agent_set()
