"""torch's launcher for functions is `dure.spawn`; the rest of torchrun says what to use instead."""

from __future__ import annotations

import argparse

import pytest

import dure.run
from dure.errors import UsageError
from dure.launch import torch_launcher
from dure.launch.torch_launcher import LaunchConfig, elastic_launch


def test_elastic_launch_returns_the_result_of_each_rank(monkeypatch: pytest.MonkeyPatch):
    calls = []

    def spawn(*args):
        calls.append(args)
        return ["a", "b"]

    monkeypatch.setattr(torch_launcher, "spawn", spawn)
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, start_method="fork")
    assert elastic_launch(config, max)(3, 4) == {0: "a", 1: "b"}
    assert calls == [(max, 2, (3, 4), "fork")]


def test_what_spawn_cannot_start_is_refused():
    for nodes, entrypoint in ((2, max), (1, "train.py")):
        with pytest.raises(UsageError):
            elastic_launch(LaunchConfig(1, nodes, 2), entrypoint)  # pyright: ignore


def test_parts_of_torchrun_exist_by_name():
    for call in (
        dure.run.get_args_parser,
        lambda: dure.run.parse_args([]),
        lambda: dure.run.config_from_args(argparse.Namespace()),
        lambda: dure.run.run(argparse.Namespace()),
    ):
        with pytest.raises(UsageError):
            call()
