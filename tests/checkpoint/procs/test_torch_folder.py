"""Checkpoints that two ranks of stock torch have saved are loaded, in any sharding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dure.checkpoint import convert, load
from dure.tensor import Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks
from tests.waiting import PATIENCE_S

PROGRAM = str(Path(__file__).with_name("torch_folder_program.py"))
SHAPES = {
    "0.weight": (7, 5), "0.bias": (7,), "1.weight": (4, 2, 3, 3), "1.bias": (4,), "2.weight": (3, 7)
}  # fmt: skip


def counted(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


WEIGHTS = {name: counted(*shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    command = [sys.executable, "-m", "dure.run", "--nproc=2", PROGRAM, str(folder)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def require_fsdp2(state: dict) -> None:
    for name, expected in WEIGHTS.items():
        assert torch.equal(state["model"][name], expected), name
        momentum = state["optim"]["state"][name]["momentum_buffer"]
        assert torch.equal(momentum, torch.full_like(expected, 2.0)), name
    assert state["step"] == 7
    assert state["names"] == ["a", {"b": (1, 2.5, None)}]


def empty_fsdp2() -> dict:
    buffers = {name: {"momentum_buffer": torch.zeros(shape)} for name, shape in SHAPES.items()}
    weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    names = ["", {"b": None}]
    return {"model": weights, "optim": {"state": buffers}, "step": 0, "names": names}


@pytest.mark.parametrize("form", ["distcp", "dure", "torch"])
def test_fsdp2_with_its_optimizer(saved, tmp_path, form):
    state, source = empty_fsdp2(), saved / "fsdp2"
    if form == "torch":
        convert(source, tmp_path / "file.pt", "torch")
        state = torch.load(tmp_path / "file.pt", weights_only=True)
    else:
        if form == "dure":
            convert(source, source := tmp_path / "ours")
        load(state, checkpoint_id=source, no_dist=True)
    require_fsdp2(state)


@pytest.mark.parametrize("form", ["distcp", "dure", "safetensors"])
def test_fsdp1(saved, tmp_path, form):
    source = saved / "fsdp1"
    if form != "distcp":
        convert(source, source := tmp_path / "converted", form)
    if form == "safetensors":
        convert(source, source := tmp_path / "back")
    prefix = "" if form == "safetensors" else "model"
    weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    state = {"model": weights} if prefix else {f"model.{name}": w for name, w in weights.items()}
    load(state, checkpoint_id=source, no_dist=True)
    for name, expected in WEIGHTS.items():
        assert torch.equal(weights[name], expected), name


def test_tensor_parallel_weights_are_loaded_into_other_shards(saved):
    def be(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        shards = {
            "0.weight": distribute_tensor(torch.zeros(8, 5), mesh, [Shard(1)]),
            "0.bias": distribute_tensor(torch.zeros(8), mesh, [Shard(0)]),
            "1.weight": distribute_tensor(torch.zeros(3, 8), mesh, [Shard(0)]),
            "1.bias": torch.zeros(3),
        }
        load({"model": shards}, checkpoint_id=saved / "tp")
        assert torch.equal(shards["0.weight"].full_tensor(), counted(8, 5))
        assert torch.equal(shards["0.bias"].full_tensor(), counted(8))
        assert torch.equal(shards["1.weight"].full_tensor(), counted(3, 8))
        assert torch.equal(shards["1.bias"], counted(3))

    run_ranks(3, be)


def test_each_stage_of_a_pipeline_has_names_of_its_own(saved):
    state = {f"stage{rank}": {"w": torch.zeros(3)} for rank in range(2)}
    load(state, checkpoint_id=saved / "pp", no_dist=True)
    assert state["stage0"]["w"].tolist() == [0, 0, 0]
    assert state["stage1"]["w"].tolist() == [1, 1, 1]
