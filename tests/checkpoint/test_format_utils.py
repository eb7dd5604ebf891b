"""A checkpoint as one file of torch.save, and back."""

import os

import pytest
import torch
from torch import nn

from dure.checkpoint import load, save
from dure.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from dure.errors import CheckpointError
from dure.tensor import Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks
from tests.checkpoint.saved_states import counted


def _as_lists(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _as_lists(inner) for key, inner in value.items()}
    return [_as_lists(inner) for inner in value] if isinstance(value, list) else value


def test_what_ranks_have_saved_becomes_one_file(tmp_path):
    def body(rank):
        whole = distribute_tensor(counted(5, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
        nested = {"list": [{"a": whole}, {"b": 1.5}], "by number": {0: counted(2), 3: "x"}}
        save({"model": nested, "betas": (0.5, 0.25), "step": 3}, checkpoint_id=tmp_path / "saved")

    run_ranks(2, body)
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=True)
    assert _as_lists(found) == {
        "model": {
            "list": [{"a": counted(5, 2).tolist()}, {"b": 1.5}],
            "by number": {0: [0, 1], 3: "x"},
        },
        "betas": (0.5, 0.25),
        "step": 3,
    }


def test_a_run_goes_through_both(tmp_path):
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "one.pt")
    torch_save_to_dcp(tmp_path / "one.pt", tmp_path / "saved")
    weights = {"model": {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}}
    load(weights, checkpoint_id=tmp_path / "saved")
    assert weights["model"]["weight"].equal(model.weight)
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "two.pt")
    found = torch.load(tmp_path / "two.pt", weights_only=True)
    assert _as_lists(found) == _as_lists(state)
    torch.optim.AdamW(nn.Linear(2, 3).parameters()).load_state_dict(found["optimizer"])


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harm",)


def test_files_that_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"x": Harmful()}, "harmful.pt")
    torch.save([1], "list.pt")
    (tmp_path / "other.pt").write_bytes(b"other")
    os.mkfifo(tmp_path / "pipe.pt")
    for file in ("harmful.pt", "list.pt", "other.pt", "absent.pt", "pipe.pt"):
        with pytest.raises(CheckpointError) as caught:
            torch_save_to_dcp(file, "saved")
        assert caught.value.path == file
    assert not (tmp_path / "harm").exists() and not (tmp_path / "saved").exists()
    with pytest.raises(CheckpointError, match="manifest"):
        dcp_to_torch_save(tmp_path, "to.pt")
    save({"x": torch.ones(3)}, checkpoint_id="saved")
    (part,) = tmp_path.glob("saved/part-*")
    part.write_bytes(part.read_bytes()[:-1] + b"\x01")
    with pytest.raises(CheckpointError, match="checksum is wrong"):
        dcp_to_torch_save("saved", "to.pt")
    assert not (tmp_path / "to.pt").exists()
