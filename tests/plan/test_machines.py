"""Machines that are known."""

import pytest

from dure.errors import UsageError
from dure.plan.machines import gpus


def test_hardware_has_sources_and_plausible_figures():
    found = gpus()
    assert {"v100", "a100", "h100", "h200", "b200"} <= set(found)
    assert all(gpu.source for gpu in found.values())


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (b"x = 1\ny = " + b"[" * 100_000, "nested too deeply"),
        (b"gpu = 3", "does not describe GPUs"),
        (b"[gpu.a]\nkind = =", "at line 2, column 8"),
        (b"\xff", "utf-8"),
    ],
)
def test_file_that_does_not_describe_machines_is_refused_at_its_place(content, seen, tmp_path):
    path = tmp_path / "machines.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        gpus(path)
    assert seen in str(caught.value)
