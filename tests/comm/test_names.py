"""Names of torch.distributed for backends and options."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

import dure
from dure.comm.backends.fake import FakeBackend
from dure.comm.backends.registry import unregister_backend
from dure.comm.names import AllgatherOptions
from dure.errors import UsageError


@pytest.fixture
def _forgotten() -> Iterator[None]:
    yield
    for name in ("mine", "theirs"):
        if name in dure.Backend.backend_list:
            unregister_backend(name)
            delattr(dure.Backend, name.upper())


@pytest.mark.usefixtures("_forgotten")
def test_a_backend_is_registered_with_torchs_arguments() -> None:
    seen: list[Any] = []

    def plain(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        seen.append((rank, size, timeout))
        return object()

    def extended(options: Any, pg_options: Any) -> Any:
        seen.append(pg_options)
        return FakeBackend(options)

    dure.Backend.register_backend("Mine", extended, True, devices="cpu")
    dure.Backend.register_backend("theirs", plain, devices=["cpu"])
    assert {"mine", "theirs", "gloo", "undefined"} <= set(dure.Backend.backend_list)
    assert dure.Backend.MINE == "mine"  # pyright: ignore
    dure.init_process_group("mine", store=dure.HashStore(), rank=0, world_size=1, pg_options="own")
    try:
        assert seen == ["own"]
        with pytest.raises(UsageError, match=r"builtins\.object"):
            dure.new_group(backend="theirs", timeout=timedelta(seconds=9))
        assert seen[1] == (0, 1, timedelta(seconds=9))
    finally:
        dure.destroy_process_group()


def test_a_backend_config_says_what_serves_which_device() -> None:
    config = dure.BackendConfig("cpu:gloo,cuda:nccl")
    assert config.get_device_backend_map() == {"cpu": "gloo", "cuda": "nccl"}
    assert repr(config) == "cpu:gloo,cuda:nccl"
    assert set(dure.BackendConfig("undefined").device_backend_map) == {"cpu"}
    with pytest.raises(UsageError):
        dure.BackendConfig("nosuch")


def test_options_and_what_reductions_take() -> None:
    for name in dure.__all__:
        if name.endswith("Options"):
            assert getattr(dure, name)().timeout < timedelta(0)
    assert AllgatherOptions().asyncOp
    assert dure.AllreduceOptions().reduceOp == dure.ReduceOp.SUM
    assert (dure.ReduceOptions().rootRank, dure.BarrierOptions().device_ids) == (0, [])
    assert dure.supports_complex(dure.ReduceOp.SUM)
    assert not dure.supports_complex(dure.ReduceOp.MAX)
