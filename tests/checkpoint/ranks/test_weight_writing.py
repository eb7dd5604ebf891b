"""Weights that ranks have columns of: exchanged, and written as consecutive bytes."""

from __future__ import annotations

import os
from types import SimpleNamespace

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
from dure.checkpoint.agreement import Ranks
from dure.checkpoint.slice_files import Kind, Slice
from dure.checkpoint.slices import Box
from dure.checkpoint.weight_folder import SINGLE
from dure.checkpoint.weight_writing import Target, WeightWriter
from dure.tensor import Shard, distribute_tensor, init_device_mesh
from dure.tensor.placement_types import StridedShard
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


def test_columns_in_strides_and_of_some_ranks_become_the_tensor(tmp_path, tiny):
    whole = counted(4, 12)

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
        strided = distribute_tensor(whole, mesh, [StridedShard(1, split_factor=2), S1])
        state = {"strided": strided}
        if rank < 2:  # two ranks have it
            state["x"] = distribute_tensor(whole, mesh["y"], [S1])
        save(state, storage_writer=HuggingFaceStorageWriter(tmp_path))

    run_ranks(4, body)
    found = load_file(tmp_path / SINGLE)
    assert found["strided"].equal(whole) and found["x"].equal(whole)


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


def test_long_runs_are_written_by_the_rank_that_has_them(tmp_path, writes, monkeypatch):
    monkeypatch.setattr(weight_writing, "MIN_RUN_BYTES", 24)
    whole = counted(2, 4, 3)

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        state = {"w": distribute_tensor(whole, mesh, [S1])}  # runs of two rows
        return save(state, storage_writer=HuggingFaceStorageWriter(tmp_path))

    held = run_ranks(2, body)[0].state_dict_metadata["w"]
    assert sorted(writes) == sorted(
        (rank, whole[i, 2 * rank : 2 * rank + 2].numpy().tobytes())
        for rank in range(2)
        for i in range(2)
    )
    assert [(list(c.offsets), list(c.sizes)) for c in held.chunks] == [
        ([i, 2 * rank, 0], [1, 2, 3]) for i in range(2) for rank in range(2)
    ]
    assert load_file(tmp_path / SINGLE)["w"].equal(whole)


@pytest.mark.parametrize("fault", ["write_all", "as_bytes"])
def test_failure_between_exchanges_fails_on_all_ranks(tmp_path, tiny, monkeypatch, fault):
    """The other ranks get what they wait for."""
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
    assert list(tmp_path.iterdir()) == []
    assert len(calls) >= 2


def test_rank_without_memory_for_the_exchange_fails_all(tmp_path, tiny, monkeypatch):
    def empty(*args, **options):
        if options.get("dtype") == torch.uint8 and args != (0,) and dure.get_rank() == 1:
            raise MemoryError
        return torch.empty(*args, **options)

    def body(rank):
        state = _distributed("ae")
        with pytest.raises(CheckpointException) as caught:
            save(state, storage_writer=HuggingFaceStorageWriter(tmp_path))
        assert list(caught.value.failures) == [1]
        assert "MemoryError" in str(caught.value.failures[1][0])

    stand_in = SimpleNamespace(**{**vars(torch), "empty": empty})
    monkeypatch.setattr(weight_writing, "torch", stand_in)
    run_ranks(3, body)
    assert list(tmp_path.iterdir()) == []


def test_each_rank_looks_at_its_own_slices_and_at_those_of_its_blocks(tmp_path, tiny, monkeypatch):
    """The steps are computed in a time that does not grow with the square of the ranks."""
    meets, plain = [], Box.meet

    def meet(self, other):
        meets.append(other)
        return plain(self, other)

    ranks = Ranks(None, alone=True)
    ranks.size = 40
    parts = [[Slice("w", Box((0, r), (80, 1)))] for r in range(40)]
    writer = WeightWriter({"w": Kind("F32", (80, 40))}, parts, lambda _: torch.empty(0), ranks)
    monkeypatch.setattr(Box, "meet", meet)
    writer.reserve({"w": [Target(tmp_path, 0)]})
    assert 0 < len(meets) <= 3 * len(writer.boxes["w"])
