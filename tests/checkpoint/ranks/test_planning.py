"""Which rank writes what, and what each rank learns of the others, in bytes."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dure
from dure.checkpoint import CheckpointException, FileSystemReader, load, save
from dure.checkpoint.agreement import Ranks
from dure.checkpoint.catalog import catalog_of
from dure.checkpoint.metadata import ChunkStorageMetadata, read_later
from dure.checkpoint.restoring import read_slices, reads_of
from dure.checkpoint.saving import Taken, save_into
from dure.checkpoint.slice_files import Slice, TensorKind
from dure.checkpoint.slices import Box, Piece
from dure.checkpoint.tree import tensor_node
from dure.errors import CheckpointError, CheckpointMismatch
from dure.tensor import DeviceMesh, Replicate, Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks
from tests.checkpoint.saved_states import counted, parts


def test_tied_tensors_are_written_once_and_loaded_by_each_name(tmp_path):
    weight = counted(3)
    save({"a": weight, "b": {"c": weight}, "d": weight[:2]}, checkpoint_id=tmp_path)
    (part,) = parts(tmp_path)
    assert sorted(part) == ["a", "d"]
    state = {"b": {"c": torch.zeros(3)}, "a": torch.zeros(3)}
    loaded = load(state, checkpoint_id=tmp_path)
    assert state["a"].tolist() == state["b"]["c"].tolist() == [0, 1, 2]
    assert loaded[:2] == ([], ["d"])
    held = FileSystemReader(tmp_path).read_metadata()
    assert sorted(held.state_dict_metadata) == ["a", "b.c", "d"]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])  # the last in the mesh has no rows
def test_tied_dtensors_are_written_once_also_where_a_rank_has_no_rows(tmp_path, order):
    def body(rank):
        mesh = DeviceMesh("cpu", order)
        rows, others = (distribute_tensor(counted(2, 3) + n, mesh, [Shard(0)]) for n in (0, 9))
        save({"a": rows, "b": {"c": rows.detach()}, "d": others}, checkpoint_id=tmp_path)
        state = {"a": torch.zeros(2, 3), "b": {"c": torch.zeros(2, 3)}, "d": torch.zeros(2, 3)}
        loaded = load(state, checkpoint_id=tmp_path)
        return state["a"].equal(counted(2, 3)), state["b"]["c"].equal(counted(2, 3)), loaded[:2]

    assert run_ranks(3, body) == [(True, True, ([], []))] * 3
    assert sorted(name[0] for part in parts(tmp_path) for name in part) == ["a", "a", "d", "d"]
    state = {"d": torch.zeros(2, 3)}
    load(state, checkpoint_id=tmp_path)
    assert state["d"].tolist() == [[9, 10, 11], [12, 13, 14]]


class _CountedRanks(Ranks):
    """A thread as a rank, without a group: exchanges are through `board`, and counted."""

    def __init__(self, rank: int, size: int, board: _Board) -> None:
        self.group, self.rank, self.size = None, rank, size
        self._board = board
        self.sent = self.received = 0

    @property
    def global_ranks(self) -> frozenset[int]:
        return frozenset(range(self.size))

    def _gathered(self, mine: Any) -> list[Any] | None:
        data = pickle.dumps(mine)
        self.sent += len(data)
        self._board.up[self.rank] = data
        self._board.barrier.wait()
        if self.rank:
            return None
        self.received += sum(map(len, self._board.up))
        return [mine, *map(pickle.loads, self._board.up[1:])]

    def _spread(self, failures: Any, answer: Any, apart: bool) -> tuple[Any, Any]:
        if self.rank == 0:
            items = answer if apart and not failures else [answer] * self.size
            self._board.down[:] = [pickle.dumps((failures, item)) for item in items]
        self._board.barrier.wait()
        data = self._board.down[self.rank]
        self._board.barrier.wait()
        self.received += len(data)
        return pickle.loads(data)


class _Board:
    def __init__(self, size: int) -> None:
        self.up, self.down = [b""] * size, [b""] * size
        self.barrier = threading.Barrier(size)


NUM_TENSORS = 12


def _rows_and_copies(rank: int, size: int, num_tensors: int) -> Taken:
    """Return a row of each of so many tensors, and 4 tensors that all ranks have."""
    taken = Taken({}, {}, {})
    for number in range(num_tensors + 4):
        name = f"w{number}"
        shape = (size, 3) if number < num_tensors else (1, 3)
        box = Box((rank, 0), (1, 3)) if number < num_tensors else Box((0, 0), (1, 3))
        taken.offer[name] = TensorKind("F32", shape), (box,), 0
        taken.memory[Slice(name, box)] = torch.full((1, 3), float(number))
        taken.tree[name] = tensor_node(name)
    return taken


def _counted_save(folder: Path, size: int, num_tensors: int = 12) -> list[_CountedRanks]:
    board = _Board(size)
    ranks = [_CountedRanks(rank, size, board) for rank in range(size)]

    def be(own: _CountedRanks) -> None:
        save_into(folder, _rows_and_copies(own.rank, size, num_tensors), own)

    threads = [threading.Thread(target=be, args=(own,)) for own in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ranks


def test_rank_sends_and_receives_as_much_however_many_ranks_save(tmp_path):
    few, many = (_counted_save(tmp_path / str(size), size) for size in (16, 256))
    for what in ("sent", "received"):
        most = max(getattr(own, what) for own in many[1:])
        assert most <= max(getattr(own, what) for own in few[1:]) + 64  # longer numbers
        assert most < 4096
    catalog = catalog_of(tmp_path / "256")
    per_file = sorted(len(catalog.in_file(number)) for number in range(256))
    assert per_file == [NUM_TENSORS] * 252 + [NUM_TENSORS + 1] * 4
    (((_, stored, _),)) = catalog.cut("w5").meeting(Box((200, 0), (1, 3)))
    assert catalog.files[stored.file].name == "part-000001-00200.safetensors"


def _counting(call: Callable[..., Any], found: dict[str, int], descriptor: int, *args: Any) -> Any:
    data = call(descriptor, *args)
    name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
    found[name] = found.get(name, 0) + (data if isinstance(data, int) else len(data))
    return data


@contextmanager
def _bytes_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Count the bytes that are read at their place in files, by the name of the file."""
    found: dict[str, int] = {}
    with monkeypatch.context() as patch:
        for call in ("pread", "preadv"):
            patch.setattr(os, call, partial(_counting, getattr(os, call), found))
        yield found


def test_load_reads_of_the_descriptions_of_256_ranks_only_those_that_it_needs(
    tmp_path, monkeypatch
):
    """256 ranks have a row of 3 numbers of each of 1,000 tensors: 256,000 slices in 256 files."""
    monkeypatch.setattr(dure.checkpoint.slice_files, "_SHORT_HEADER", 1 << 16)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        _counted_save(tmp_path, 256, 1000)
    assert (tmp_path / "part-000001-00255.safetensors").stat().st_size > 80_000  # the header
    # The manifest is read completely: 1,004 tensors, of some 270 bytes each.
    assert (tmp_path / "manifest.json").stat().st_size < 300_000

    with _bytes_read(monkeypatch) as read:
        state = {"w7": torch.zeros(256, 3)}
        load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["w7"].eq(7).all()
    # Of each file its identity of 63 bytes, a row of 12 bytes, and the 8 digits of its checksum.
    # 64 files stay open; the others are opened again, and compared again.
    assert read == {
        f"part-000001-{rank:05d}.safetensors": 63 + 20 if rank < 64 else 2 * 63 + 20
        for rank in range(256)
    }

    with _bytes_read(monkeypatch) as read:
        wanted = {f"w{n}": torch.zeros(1, 3) for n in range(1000)}
        catalog = catalog_of(tmp_path)
        reads = [
            one
            for name, to in wanted.items()
            for one in reads_of(catalog, name, Piece(Box((200, 0), (1, 3)), to))
        ]
        read_slices(tmp_path, catalog, reads, 1)
    assert [to[0, 0].item() for to in wanted.values()] == list(range(1000))
    assert read.keys() == {"part-000001-00200.safetensors"}
    assert read["part-000001-00200.safetensors"] == 63 + 1000 * 20


def test_rank_learns_of_a_save_and_a_load_as_much_however_many_ranks_there_are(tmp_path):
    """Also where ranks have different values, so that each sends its own."""

    def exchanged(size):
        received = []
        real = dure.checkpoint.agreement.broadcast_object_list

        def body(rank):
            state = {"w": torch.full((3,), float(rank)), "own": {f"r{rank}": rank}}
            save(state, checkpoint_id=tmp_path / str(size))
            load({"w": torch.zeros(3)}, checkpoint_id=tmp_path / str(size))

        def noted(objects, **options):
            real(objects, **options)
            received.append(len(pickle.dumps(objects[0])))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dure.checkpoint.agreement, "broadcast_object_list", noted)
            run_ranks(size, body)
        return max(received)

    assert exchanged(12) <= exchanged(3) + 8


def test_ranks_that_are_left_save_what_a_mesh_of_the_old_world_holds(tmp_path):
    def body(rank):
        mesh = init_device_mesh("cpu", (3,))
        state = {
            "copied": distribute_tensor(counted(4, 2), mesh, [Replicate()]),
            "plain": counted(5),
            "rows": distribute_tensor(counted(6, 2), mesh, [Shard(0)]),
        }
        if rank == 2:
            return None
        group = dure.shrink_group([2])
        assert group.size() == 2
        with pytest.raises(CheckpointException) as caught:
            save(state, checkpoint_id=tmp_path)
        del state["rows"]
        meta = save(state, checkpoint_id=tmp_path)
        return caught.value.failures[rank][0].seen, sorted(meta.state_dict_metadata)

    for seen, names in filter(None, run_ranks(3, body)):
        assert "'rows'" in seen and "in no slice" in seen
        assert names == ["copied", "plain"]
    state = {"copied": torch.zeros(4, 2), "plain": torch.zeros(5)}
    load(state, checkpoint_id=tmp_path)
    assert state["copied"].equal(counted(4, 2)) and state["plain"].equal(counted(5))


def test_the_rank_whose_tensor_has_another_shape_is_named_on_all(tmp_path):
    def body(rank):
        with pytest.raises(CheckpointException) as caught:
            save({"v": torch.ones(2), "w": torch.ones(3 + (rank == 2))}, checkpoint_id=tmp_path)
        return {(type(e), e.seen) for e, _ in caught.value.failures.values()}

    wanted = {(CheckpointMismatch, "w is F32[4] on rank 2, F32[3] on a lower rank")}
    assert run_ranks(4, body) == [wanted] * 4


def test_the_rank_without_a_key_that_all_must_have_is_named_on_all(tmp_path):
    def body(rank):
        state = {"a": 1, "b": torch.ones(2)} if rank != 1 else {"a": 1}
        with pytest.raises(CheckpointMismatch) as caught:
            dure.checkpoint.Checkpointer(tmp_path).save(1, x=state)
        seen = caught.value.seen
        del caught
        return seen

    assert run_ranks(3, body) == ["x.b is not on rank 1"] * 3


@pytest.mark.parametrize("length", [0, 1 << 17])  # of a value: manifests that are kept, and open
def test_what_a_save_returns_is_the_same_on_all_ranks_and_after_later_saves(tmp_path, length):
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        state = {"w": distribute_tensor(counted(4, 2), mesh, [Shard(0)]), "n": {"x": "1" * length}}
        held, other = (save(state, checkpoint_id=tmp_path / name) for name in "ab")
        again = pickle.loads(pickle.dumps(held))
        for _ in range(2):
            save({"y": 2}, checkpoint_id=tmp_path / "b")
        assert again == held == other and held.storage_data is None
        return held

    first, second = run_ranks(2, body)
    assert first == second
    rows = [ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([2, 2])) for at in (0, 2)]
    assert first.state_dict_metadata["w"].chunks == rows
    assert first.planner_data == {"w": ("w",), "n.x": ("n", "x")}


def test_what_a_save_returns_is_an_error_if_another_save_was_faster(tmp_path):
    save({"y": 2}, checkpoint_id=tmp_path)
    held = read_later(tmp_path, b"0" * 64)
    with pytest.raises(CheckpointError, match="not the one that was written"):
        _ = held.state_dict_metadata


def test_what_saves_return_keeps_no_file_open_when_it_is_freed(tmp_path):
    before = os.listdir("/proc/self/fd")
    held = [save({"y": "2" * (1 << 17)}, checkpoint_id=tmp_path) for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) >= len(before) + 3
    del held
    assert len(os.listdir("/proc/self/fd")) < len(before) + 3
