"""Checkpoints in another form: what is kept, what is refused, how much is in memory."""

from __future__ import annotations

import gc
import os
import weakref

import pytest
import torch
from torch.distributed.checkpoint import load as load_as_torch
from torch.distributed.checkpoint import save as save_as_torch
from typer.testing import CliRunner

from dure.checkpoint import consolidate, convert, load, save, slice_files
from dure.checkpoint.format_utils import dcp_to_torch_save
from dure.checkpoint.reading import differences
from dure.checkpoint.torch_folder import TorchFolder
from dure.cli.checkpoint import commands
from dure.errors import CheckpointError, CheckpointException, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state():
    return {
        "model": {"w": torch.arange(6.0).view(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)},
        "groups": [{"lr": 0.5, "params": [0, 1]}, {"lr": torch.tensor(2)}],
        "empty": torch.zeros(0, 4),
        "step": 7,
    }


def require_state(found):
    assert found["model"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["model"]["half"].dtype is torch.bfloat16
    assert found["model"]["half"].tolist() == [1, 1, 1]
    assert found["groups"][0] == {"lr": 0.5, "params": [0, 1]}
    assert found["groups"][1]["lr"].item() == 2
    assert found["empty"].shape == (0, 4)
    assert found["step"] == 7


def blank():
    return {
        "model": {"w": torch.zeros(2, 3), "half": torch.zeros(3, dtype=torch.bfloat16)},
        "groups": [{"lr": 0.0, "params": []}, {"lr": torch.tensor(0)}],
        "empty": torch.ones(0, 4),
        "step": 0,
    }


def made(form, path):
    """Save the state in one form, each by its own library."""
    if form == "dure":
        save(state(), checkpoint_id=path, no_dist=True)
    elif form == "torch":
        torch.save(state(), path)
    else:
        save_as_torch(state(), checkpoint_id=path, no_dist=True)


def read(form, path):
    """Read it, each by its own library."""
    if form == "torch":
        return torch.load(path, weights_only=True)
    found = blank()
    if form == "dure":
        load(found, checkpoint_id=path, no_dist=True)
    else:
        load_as_torch(found, checkpoint_id=path, no_dist=True)
    return found


@pytest.mark.parametrize("to", ["dure", "torch", "distcp"])
@pytest.mark.parametrize("source", ["dure", "torch", "distcp"])
def test_every_form_as_every_other(source, to, tmp_path):
    made(source, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", to)
    require_state(read(to, tmp_path / "b"))


@pytest.mark.parametrize("source", ["dure", "torch", "distcp"])
def test_weights_as_safetensors_and_back(source, tmp_path):
    weights = {"w": torch.arange(6.0).view(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)}
    if source == "torch":
        torch.save(weights, tmp_path / "a")
    else:
        one = save if source == "dure" else save_as_torch
        one(weights, checkpoint_id=tmp_path / "a", no_dist=True)
    convert(tmp_path / "a", tmp_path / "b", "safetensors")
    convert(tmp_path / "b", tmp_path / "c", source)
    if source == "torch":
        found = torch.load(tmp_path / "c", weights_only=True)
    else:
        found = {"w": torch.zeros(2, 3), "half": torch.zeros(3, dtype=torch.bfloat16)}
        one = load if source == "dure" else load_as_torch
        one(found, checkpoint_id=tmp_path / "c", no_dist=True)
    assert found["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["half"].tolist() == [1, 1, 1]


def test_values_are_no_weights(tmp_path):
    made("distcp", tmp_path / "a")
    with pytest.raises(
        CheckpointException, match=r"only contain tensors: .groups\.0\.lr. is a value"
    ):
        convert(tmp_path / "a", tmp_path / "b", "safetensors")
    assert not list((tmp_path / "b").glob("*.safetensors"))


def test_one_slice_at_a_time_is_in_memory(tmp_path, monkeypatch):
    weights = {f"w{number}": torch.ones(1000) for number in range(8)}
    save_as_torch(weights, checkpoint_id=tmp_path / "a", no_dist=True)
    alive, most = weakref.WeakSet(), []
    read_slice = TorchFolder.slice

    def counted(self, name, chunk):
        gc.collect()
        most.append(len(alive))
        tensor = read_slice(self, name, chunk)
        alive.add(tensor.untyped_storage())
        return tensor

    monkeypatch.setattr(TorchFolder, "slice", counted)
    convert(tmp_path / "a", tmp_path / "b")
    assert len(most) == 8
    assert max(most) <= 1


READERS = {
    "convert to dure": lambda a, b, to: convert(a, to),
    "convert to safetensors": lambda a, b, to: convert(a, to, "safetensors"),
    "convert to torch": lambda a, b, to: convert(a, to, "torch"),
    "convert to distcp": lambda a, b, to: convert(a, to, "distcp"),
    "consolidate": lambda a, b, to: consolidate(a, to),
    "dcp_to_torch_save": lambda a, b, to: dcp_to_torch_save(a, to),
    "differences": lambda a, b, to: differences(a, b),
    "load": lambda a, b, to: load(
        {f"w{n}": torch.zeros(1) for n in range(50)}, checkpoint_id=a, no_dist=True
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_the_header_of_a_file_is_read_as_often_for_50_tensors_as_for_one(
    reader, tmp_path, monkeypatch
):
    for name, value in (("a", 1.0), ("b", 2.0)):
        state = {f"w{number}": torch.full((1,), value) for number in range(50)}
        save(state, checkpoint_id=tmp_path / name, no_dist=True)
    headers, parses = list[str](), list[int]()
    pread, parse = os.pread, slice_files.parse_json

    def reading(descriptor, count, at):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if at == 0 and name.endswith(".safetensors"):
            headers.append(name)
        return pread(descriptor, count, at)

    def parsing(text):
        parses.append(len(text))
        return parse(text)

    monkeypatch.setattr(os, "pread", reading)
    monkeypatch.setattr(slice_files, "parse_json", parsing)
    READERS[reader](tmp_path / "a", tmp_path / "b", tmp_path / "to")
    part = "part-000001-00000.safetensors"
    # Once to compare its checksum, once to compare the places of slices.
    folders = ["a", "b"] if reader == "differences" else ["a"]
    assert sorted(headers) == [str(tmp_path / f / part) for f in folders for _ in range(2)]
    assert len(parses) <= 1


@pytest.mark.parametrize("to", ["dure", "torch", "distcp"])
def test_a_target_that_is_taken_stays_as_it_is(to, tmp_path):
    made("dure", tmp_path / "a")
    made(to, tmp_path / "b")
    with pytest.raises(UsageError, match="there is something at the target already"):
        convert(tmp_path / "a", tmp_path / "b", to)
    require_state(read(to, tmp_path / "b"))


@pytest.mark.parametrize("to", ["dure", "torch"])
def test_a_target_is_replaced_where_that_is_asked_for(to, tmp_path):
    made("distcp", tmp_path / "a")
    if to == "dure":
        save({"old": 1}, checkpoint_id=tmp_path / "b", no_dist=True)
    else:
        torch.save({"old": 1}, tmp_path / "b")
    convert(tmp_path / "a", tmp_path / "b", to, overwrite=True)
    require_state(read(to, tmp_path / "b"))


def test_a_damaged_source_leaves_nothing_that_can_be_loaded(tmp_path):
    made("distcp", tmp_path / "a")
    (file,) = (tmp_path / "a").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises((CheckpointError, CheckpointException), match="damaged"):
        convert(tmp_path / "a", tmp_path / "b")
    with pytest.raises(CheckpointException):
        load(blank(), checkpoint_id=tmp_path / "b", no_dist=True)


def test_a_source_that_is_nothing_of_it(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(CheckpointError, match=str(tmp_path / "a")):
        convert(tmp_path / "a", tmp_path / "b")
    (tmp_path / "file").write_bytes(b"text")
    with pytest.raises(CheckpointError, match="the file cannot be used"):
        convert(tmp_path / "file", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_form_that_is_none(tmp_path):
    made("dure", tmp_path / "a")
    with pytest.raises(UsageError, match="to='zip'"):
        convert(tmp_path / "a", tmp_path / "b", "zip")  # pyright: ignore[reportArgumentType]


def test_the_command_line(tmp_path):
    made("distcp", tmp_path / "a")
    done = CliRunner().invoke(commands, ["convert", str(tmp_path / "a"), str(tmp_path / "b")])
    assert done.exit_code == 0, done.output
    require_state(read("dure", tmp_path / "b"))
    done = CliRunner().invoke(
        commands, ["convert", str(tmp_path / "a"), str(tmp_path / "c"), "--to", "zip"]
    )
    assert done.exit_code == 2
    assert "'zip' is none of dure, safetensors, torch, distcp" in " ".join(done.output.split())
