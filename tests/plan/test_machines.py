"""Machines that are known."""

from __future__ import annotations

from dure.plan.machines import gpus


def test_hardware_has_sources_and_plausible_figures():
    found = gpus()
    assert {"v100", "a100", "h100", "h200", "b200"} <= set(found)
    assert all(gpu.source for gpu in found.values())
