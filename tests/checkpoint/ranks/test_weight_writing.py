"""Weights that ranks have columns of: exchanged, and written as consecutive bytes."""

import os

import pytest
import torch
from safetensors.torch import load_file

import dure
from dure.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    files,
    load,
    save,
    weight_writing,
)
from dure.checkpoint.weight_folder import SINGLE
from dure.tensor import Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks
from tests.checkpoint.saved_states import counted

S0, S1, S2 = Shard(0), Shard(1), Shard(2)
WHOLE = {
    "a": (counted(5, 7), S1),
    "b": (counted(3, 5, dtype=torch.bfloat16), S1),
    "c": (counted(2, 3, 4), S2),
    "d": (counted(6, dtype=torch.int64), S0),
    "e": (counted(2, 1, 5, 3), S2),
    "f": (counted(1, 2, dtype=torch.uint8), S1),  # ranks without elements
}


@pytest.fixture
def tiny(monkeypatch):
    """Portions of 24 bytes."""
    for name in ("PORTION_BYTES", "PIECE_BYTES"):
        monkeypatch.setattr(weight_writing, name, 24)


@pytest.fixture
def writes(monkeypatch):
    """Record the rank and the bytes of each write of tensors."""
    found = []

    def write_all(descriptor, data, at):
        found.append((dure.get_rank(), bytes(data)))
        os.pwrite(descriptor, data, at)

    monkeypatch.setattr(weight_writing, "write_all", write_all)
    return found


def _distributed(names="abcdef"):
    mesh = init_device_mesh("cpu", (dure.get_world_size(),))
    return {n: distribute_tensor(WHOLE[n][0], mesh, [WHOLE[n][1]]) for n in names}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_columns_of_all_ranks_become_the_tensor(tmp_path, tiny, num_ranks):
    def body(rank):
        save(_distributed(), storage_writer=HuggingFaceStorageWriter(tmp_path))
        state = {name: torch.zeros_like(whole) for name, (whole, _) in WHOLE.items()}
        load(state, storage_reader=HuggingFaceStorageReader(tmp_path))  # compares the checksums
        return state

    for state in [*run_ranks(num_ranks, body), load_file(tmp_path / SINGLE)]:
        assert {n: t.tolist() for n, t in state.items()} == {
            n: whole.tolist() for n, (whole, _) in WHOLE.items()
        }


def test_columns_are_written_together_by_all_ranks(tmp_path, writes):
    """Each rank has columns of 4 bytes, and writes one tensor at once."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        state = {n: distribute_tensor(counted(32, 2), mesh, [S1]) for n in ("v", "w")}
        save(state, storage_writer=HuggingFaceStorageWriter(tmp_path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_writing, "PIECE_BYTES", 1)
        run_ranks(2, body)
    data = counted(32, 2).numpy().tobytes()
    assert sorted(writes) == [(0, data), (1, data)]


@pytest.mark.parametrize(("dim", "count"), [(0, 48), (1, 24)])
def test_disk_starts_to_write_while_the_rest_is_exchanged(tmp_path, tiny, monkeypatch, dim, count):
    """By rows, a rank writes 192 consecutive bytes; by columns, every second portion of 24."""
    started = []
    monkeypatch.setattr(files, "PIECE_BYTES", 24)
    monkeypatch.setattr(weight_writing, "_FLUSH_BYTES", count)
    monkeypatch.setattr(weight_writing, "start_flush", lambda _, *part: started.append(part))

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        state = {"w": distribute_tensor(counted(48, 2), mesh, [Shard(dim)])}
        save(state, storage_writer=HuggingFaceStorageWriter(tmp_path))

    run_ranks(2, body)
    begin = (tmp_path / SINGLE).stat().st_size - 384
    assert sorted(started) == [(begin + at, count) for at in range(0, 384, count)]


@pytest.mark.parametrize("fault", ["write_all", "as_bytes"])
def test_failure_between_exchanges_fails_on_all_ranks_and_leaves_the_weights_before(
    tmp_path, tiny, monkeypatch, fault
):
    """The other ranks get what they wait for."""
    save({"w": counted(4)}, storage_writer=HuggingFaceStorageWriter(tmp_path))
    calls, plain = [], getattr(weight_writing, fault)

    def failing(*args):
        if dure.get_rank() == 1:
            calls.append(args)
            if len(calls) == 2:
                raise OSError(28, "No space left on device")
        return plain(*args)

    def body(rank):
        with pytest.raises(CheckpointException) as caught:
            save(_distributed("abce"), storage_writer=HuggingFaceStorageWriter(tmp_path))
        assert {r: type(error) for r, (error, _) in caught.value.failures.items()} == {1: OSError}

    monkeypatch.setattr(weight_writing, fault, failing)
    run_ranks(3, body)
    assert len(calls) >= 2
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    assert load_file(tmp_path / SINGLE)["w"].equal(counted(4))
