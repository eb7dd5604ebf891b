"""Reading a run's checkpoints: damage is found, and the older one is used."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dure.checkpoint import Checkpointer, consolidate, load, save
from dure.checkpoint.catalog import Manifest, catalog_of, publish
from dure.checkpoint.format_utils import dcp_to_torch_save
from dure.checkpoint.reading import Mapped, faults
from dure.checkpoint.slice_files import FileLayout, FileRecord, Slice, TensorKind, write_slices
from dure.checkpoint.slices import Box
from dure.checkpoint.tree import tensor_node
from dure.comm.checksum import crc32c
from dure.errors import CheckpointDamaged, CheckpointError
from tests.checkpoint.manifests import read_manifest, write_manifest
from tests.checkpoint.small_runs import equal, small


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path):
    path = Checkpointer(tmp_path).save(1, state={"x": torch.ones(1000)})
    loaded = {}
    Checkpointer(tmp_path).load(state=loaded)
    with (path / "part-000001-00000.safetensors").open("r+b") as file:
        file.truncate(0)
    assert loaded["x"].sum() == 1000


FOREIGN = {
    "deep": b"[" * 100_000,
    "no rank": b'{"(run)": {"step": 2, "ranks": {}}}',
    "no random numbers": b'{"(run)": {"step": 2, "ranks": {"0": {}}}}',
    "no run": b"{}",
    "no device": b'{"x": {"$": "device", "v": "nowhere"}}',
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_manifest_that_nobody_here_wrote_is_refused_and_the_older_one_taken(tmp_path, kind):
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, model=small())
    newest = checkpoints.save(2, model=small())
    fields = read_manifest(newest)
    del fields["state"]
    text = json.dumps(fields).encode()
    write_manifest(newest, b'{"state": %b, %b' % (FOREIGN[kind], text[1:]))
    assert checkpoints.load(model=small()) == 1
    assert list(checkpoints.refused) == [str(newest)]


# --------------------------------------------------------------------------------------------------
# Reading under limits of the system: errors that say nothing about bytes; few files, no memory.


NOT_DAMAGE = [errno.EMFILE, errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOMEM]


def _fail_once(monkeypatch, call: str, wanted: str, number: int) -> None:
    """Let the first `os.open` of the file `wanted`, or the first read of it, fail."""
    real, left = getattr(os, call), [1]

    def failing(what, *args, **options):
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)
        if path.endswith(wanted) and left:
            left.pop()
            raise OSError(number, os.strerror(number), path)
        return real(what, *args, **options)

    monkeypatch.setattr(os, call, failing)


@pytest.mark.parametrize("number", NOT_DAMAGE)
@pytest.mark.parametrize("file", ["manifest.json", "part-000001-00000.safetensors"])
def test_error_of_the_system_is_raised_and_no_older_checkpoint_taken(
    tmp_path, monkeypatch, number, file
):
    checkpoints = Checkpointer(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, model=small(step))
    model = small(5)
    _fail_once(monkeypatch, "open", f"000002-step-2/{file}", number)
    with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
        checkpoints.load(model=model)
    assert not isinstance(caught.value, CheckpointDamaged)
    assert equal(model.state_dict(), small(5).state_dict()) and not checkpoints.refused
    assert checkpoints.load(model=model) == 2


def test_file_that_becomes_shorter_while_it_is_checked_is_damaged(tmp_path):
    save({"w": torch.ones(1 << 16)}, checkpoint_id=tmp_path)
    mapped = Mapped(tmp_path, catalog_of(tmp_path))
    mapped.open_all()
    os.truncate(tmp_path / "part-000001-00000.safetensors", 4096)
    with pytest.raises(CheckpointDamaged, match="is truncated: 4096 bytes"):
        mapped.check(catalog_of(tmp_path).parts("w"))


SAVE = "0123456789abcdef" * 2


def _of_many_ranks(folder: Path, count: int) -> None:
    """Write a checkpoint of w = [0, 1, ...], one element per rank."""
    kinds = {"w": TensorKind("F32", (count,))}
    written = {}
    folder.mkdir()
    for rank in range(count):
        part, name = Slice("w", Box((rank,), (1,))), f"part-000001-{rank:05d}.safetensors"
        layout = FileLayout.summed([part], kinds)
        memory = {part: torch.tensor([float(rank)])}
        written[rank] = write_slices(folder / name, layout, memory, f"{SAVE}{rank:08d}")
    each, zeros, ones = [[0, 1, count]], [[0, 0, count]], [[1, 0, count]]
    slices = {"offsets": [each], "sizes": [ones], "files": each, "begins": zeros, "places": zeros}
    tensors = {"w": {"dtype": "F32", "shape": [count]} | slices}
    publish(folder, Manifest({"w": tensor_node("w")}, 1, SAVE, written, json.dumps(tensors)))


@contextmanager
def _limited(kind: int, soft: int) -> Iterator[None]:
    old, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (old, hard))


def test_more_files_than_may_be_open_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)  # 150 of them
    _of_many_ranks(tmp_path / "of 150", 150)
    used = set(map(int, os.listdir("/proc/self/fd")))
    most = sorted(set(range(1000)) - used)[100]  # descriptors have numbers below this
    loaded = {"w": torch.zeros(150, dtype=torch.float64)}
    with _limited(resource.RLIMIT_NOFILE, most):
        load(loaded, checkpoint_id=tmp_path / "of 150")
        consolidate(tmp_path / "of 150", tmp_path / "weights")
        dcp_to_torch_save(tmp_path / "of 150", tmp_path / "one.pt")
        assert faults(tmp_path / "of 150", catalog_of(tmp_path / "of 150")) == []
    assert loaded["w"].tolist() == list(range(150))
    assert torch.load(tmp_path / "one.pt")["w"].tolist() == list(range(150))


LARGE = 1 << 28  # bytes; a hole in the file, which takes neither disk nor memory


def _with_a_large_tensor(folder: Path) -> None:
    """Write a checkpoint of a small tensor, [0, 1, 2, 3], and of a large one, of zeros."""
    kinds = {"large": TensorKind("U8", (LARGE,)), "small": TensorKind("F32", (4,))}
    parts = {"large": Slice("large", Box((0,), (LARGE,))), "small": Slice("small", Box((0,), (4,)))}
    layout = FileLayout.summed(parts.values(), kinds)
    numbers = torch.arange(4.0).numpy().tobytes()
    sums = b"%08x%08x" % (crc32c(memoryview(numbers)), _CRC_OF_ZEROS)
    header = layout.completed(f"{SAVE}00000000", sums)
    with (folder / "part-000001-00000.safetensors").open("wb") as file:
        file.truncate(layout.num_bytes)
        file.write(header)
        file.seek(layout.begins[parts["small"]])
        file.write(numbers)
    tensors = {
        name: {
            "dtype": kind.dtype,
            "shape": kind.shape,
            "offsets": [[0]],
            "sizes": [[kind.shape[0]]],
            "files": [0],
            "begins": [16 * (name == "large")],  # behind the small one, whose elements are larger
            "places": [int(name == "large")],
        }
        for name, kind in kinds.items()
    }
    tree = {name: tensor_node(name) for name in kinds}
    record = FileRecord(layout.num_bytes, len(header), crc32c(header))
    publish(folder, Manifest(tree, 1, SAVE, {0: record}, json.dumps(tensors)))


@contextmanager
def _little_memory() -> Iterator[None]:
    """Let this process have half as much more memory as the large tensor needs."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with _limited(resource.RLIMIT_AS, used + LARGE // 2):
        yield


def test_small_tensor_of_a_file_larger_than_memory_is_converted(tmp_path):
    _with_a_large_tensor(tmp_path)
    state = {"small": torch.zeros(4, dtype=torch.float64)}
    every_second = torch.zeros(4, 2)
    with _little_memory():
        load(state, checkpoint_id=tmp_path, no_dist=True)
        load({"small": every_second[:, 1]}, checkpoint_id=tmp_path, no_dist=True)
    assert state["small"].tolist() == [0, 1, 2, 3]
    assert every_second.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]


_CRC_OF_ZEROS = 0x02F63B78
