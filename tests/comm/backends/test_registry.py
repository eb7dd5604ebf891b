"""Backends by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dure.comm.backends import registry
from dure.errors import UsageError


def _factory(options: Any) -> Any:
    return options


@pytest.fixture
def own_backend():
    registry.register_backend("Mine", _factory, devices=("cpu", "cuda"))
    yield "mine"
    registry.unregister_backend("mine")


def test_one_backend_for_each_device():
    assert registry.parse_backend("cpu:gloo, cuda:nccl") == {"cpu": "gloo", "cuda": "nccl"}
    assert registry.parse_backend("cuda:hybrid") == {"cuda": "hybrid"}


@pytest.mark.parametrize(
    ("accelerator", "kinds"), [("cuda", ["cpu", "cuda"]), ("mps", ["cpu"]), (None, ["cpu"])]
)
def test_a_bare_name_stands_for_cpu_tensors_and_those_that_are_staged(
    monkeypatch, accelerator, kinds
):
    found = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    assert list(registry.parse_backend("gloo")) == kinds
    assert list(registry.parse_backend("nccl")) == ["cuda"]


@pytest.mark.parametrize(
    "spec",
    [
        "nosuch",
        "cpu:nosuch",
        "cpu:",
        ":gloo",
        "cpu:gloo,cpu:shm",
        "meta:shm",
        "cuda:mine",
        "cpu:gloo,",
        "",
    ],
)
def test_malformed_or_unknown_backend_is_a_usage_error(spec):
    with pytest.raises(UsageError):
        registry.parse_backend(spec)


def test_registered_backend_is_found_and_created(own_backend):
    assert own_backend in registry.known_backends()
    assert registry.parse_backend("mine") == {"cpu": "mine", "cuda": "mine"}
    options: Any = object()
    assert registry.open_backend("mine", options).complete() is options


@pytest.mark.parametrize("name", ["shm", "two words", "mine"])
def test_name_that_is_taken_or_malformed_is_refused(own_backend, name):
    with pytest.raises(UsageError):
        registry.register_backend(name, _factory)


class ProcessGroupNCCL:
    """Stands for torch's class, which builds without NCCL do not have."""

    class Options:
        pass


@pytest.mark.parametrize(
    ("names", "given", "used"),
    [
        (["shm"], None, True),
        (["gloo"], {"verify": True}, True),
        (["shm", "nccl"], ProcessGroupNCCL.Options(), True),
        (["mine"], object(), True),
        (["fake"], object(), True),
        (["gloo"], {"verify": True, "threads": 4}, False),
        (["shm"], ProcessGroupNCCL.Options(), False),
        (["nccl"], object(), False),
    ],
)
@pytest.mark.usefixtures("own_backend")
def test_options_that_no_backend_uses_are_refused(names, given, used):
    if used:
        registry.check_pg_options(names, given)
    else:
        with pytest.raises(UsageError):
            registry.check_pg_options(names, given)
