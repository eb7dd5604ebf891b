"""Which device of its host a mesh binds a rank to."""

import pytest
import torch

from dure.mesh.device_mesh import _choose_device  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("device_type", ["cuda", "xpu"])
@pytest.mark.parametrize(
    ("available", "initialized", "local_rank", "chosen"),
    [
        (True, False, "5", [1]),  # of 4 devices
        (True, True, "5", []),  # the program has chosen
        (True, False, None, []),
        (False, False, "5", []),
    ],
)
def test_a_rank_is_bound_to_the_device_of_its_number(
    monkeypatch: pytest.MonkeyPatch,
    device_type: str,
    available: bool,
    initialized: bool,
    local_rank: str | None,
    chosen: list[int],
):
    found: list[int] = []
    module = getattr(torch, device_type)
    monkeypatch.setattr(module, "is_available", lambda: available)
    monkeypatch.setattr(module, "is_initialized", lambda: initialized)
    monkeypatch.setattr(module, "device_count", lambda: 4)
    monkeypatch.setattr(module, "set_device", found.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    _choose_device(device_type)
    assert found == chosen


def test_a_mesh_of_cpus_binds_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    _choose_device("cpu")
