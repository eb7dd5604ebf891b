"""Manifests and headers with any field changed, and right checksums: only errors of Dure.

Every reader of a checkpoint either reads a changed one (a value of the state may be another), or
raises an error of Dure that names the folder. Which fields are changed, and to what, is drawn, the
same in each run.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dure.checkpoint import Checkpointer, convert, load
from dure.checkpoint.catalog import catalog_of
from dure.checkpoint.file_storages import FileSystemReader, HuggingFaceStorageReader
from dure.checkpoint.format_utils import dcp_to_torch_save
from dure.checkpoint.reading import differences, faults
from dure.comm.checksum import crc32c
from dure.errors import CheckpointDamaged, CheckpointException, DureError
from tests.checkpoint.manifests import read_manifest, write_manifest

STORED = Path(__file__).parent / "stored"
SEED, CASES = 7, 60
OTHERS = [
    *(None, True, 0, 1, -1, 2, 7, 1 << 20, 1 << 31, 1 << 40, (1 << 62) - 1, 1 << 62, 1 << 80, 0.5),
    *("", "x", "F32", "U8", "0" * 16, "w", "../x", [], {}, [0], [[0, 0, 1 << 19]], [[0, 1, 4]]),
    *([0, 1], ["x"], {"$": "tensor", "v": "w"}, {"$": "tensor", "v": []}, {"$": "?"}, {"$": 1}),
    *({"$": "tuple", "v": 1}, {"$": "device", "v": "nowhere"}, {"": None}, [1 << 62, 1 << 62]),
]


def _places(node: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all nodes below the root."""
    items = node.items() if isinstance(node, dict) else []
    found: list[tuple[Any, ...]] = []
    for key, below in enumerate(node) if isinstance(node, list) else items:
        found += [(*here, key), *_places(below, (*here, key))]
    return found


def _changed(root: dict[str, Any], drawn: random.Random) -> tuple[dict[str, Any], str]:
    """Return a copy with one or two nodes replaced, removed or doubled, and what was done."""
    root, done = copy.deepcopy(root), list[str]()
    for _ in range(drawn.choice([1, 1, 2])):
        path = drawn.choice(_places(root))
        above = root
        for key in path[:-1]:
            above = above[key]
        how = drawn.choice(["replace", "replace", "replace", "remove", "double"])
        if how == "replace":
            above[path[-1]] = other = copy.deepcopy(drawn.choice(OTHERS))
            done.append(f"{path} = {other!r:.60}")
        elif how == "remove":
            del above[path[-1]]
            done.append(f"{path} removed")
        elif isinstance(above, list):
            above.append(copy.deepcopy(above[path[-1]]))
            done.append(f"{path} doubled")
        else:
            above[f"{path[-1]}'"] = copy.deepcopy(above[path[-1]])
            done.append(f"{path} doubled")
    return root, "; ".join(done)


def _state() -> dict[str, Any]:
    return {
        "w": torch.zeros(7, 5, dtype=torch.bfloat16),
        "c": torch.zeros(2, dtype=torch.complex64),
        "half": torch.zeros(2, dtype=torch.float16),
        "empty": torch.zeros(0, 3),
        "step": 0,
    }


def _resume(run: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.1)
    Checkpointer(run.parent).load(model=model, optimizer=optimizer, values={})


OF_SHARDED: dict[str, Callable[[Path, Path], object]] = {
    "load": lambda folder, _: load(_state(), checkpoint_id=folder, no_dist=True),
    "a part": lambda folder, _: load(
        {"w": torch.zeros(7, 5)[:, 1:]}, checkpoint_id=folder, no_dist=True
    ),
    "verify": lambda folder, _: faults(folder, catalog_of(folder)),
    "diff": lambda folder, _: differences(folder, STORED / "format_4" / "sharded"),
    "convert": lambda folder, to: convert(folder, to / "dure"),
    "convert to distcp": lambda folder, to: convert(folder, to / "distcp", "distcp"),
    "dcp_to_torch_save": lambda folder, to: dcp_to_torch_save(folder, to / "one.pt"),
    "metadata": lambda folder, _: repr(FileSystemReader(folder).read_metadata()),
}
OF_RUN: dict[str, Callable[[Path, Path], object]] = {
    "resume": lambda folder, _: _resume(folder),
    "verify": OF_SHARDED["verify"],
}
OF_WEIGHTS: dict[str, Callable[[Path, Path], object]] = {
    "load": lambda folder, _: load(
        {"w": torch.zeros(7, 5)}, storage_reader=HuggingFaceStorageReader(folder), no_dist=True
    ),
    "convert": lambda folder, to: convert(folder, to / "dure"),
}


def _read(readers: dict[str, Callable[[Path, Path], object]], folder: Path, change: str) -> int:
    """Read a folder in each way; return how many raised an error.

    Raises:
        AssertionError: One raised another error than those of Dure.
    """
    refused = 0
    for name, reader in readers.items():
        to = folder.parent / "to"
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir()
        try:
            reader(folder, to)
        except CheckpointException as e:
            refused += 1
            others = [error for error, _ in e.failures.values() if not isinstance(error, DureError)]
            assert not others, f"{name} of {change}: {others!r}"
        except DureError:
            refused += 1
        except Exception as e:
            raise AssertionError(f"{name} of {change}: {type(e).__name__}: {e}") from e
    return refused


def _copied(source: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("format", ["format_2", "format_3", "format_4"])
@pytest.mark.parametrize("kind", ["sharded", "run"])
def test_any_changed_field_of_a_manifest_is_read_or_an_error_of_dure(tmp_path, format, kind):
    name = "000001-step-3" if kind == "run" else ""
    source = STORED / format / kind / name
    folder = tmp_path / "saved" / name
    readers = OF_RUN if kind == "run" else OF_SHARDED
    drawn, refused = random.Random(f"{SEED} {format} {kind}"), 0
    _copied(source, folder)
    fields = read_manifest(folder) if format != "format_2" else _of_format_2(folder)
    for _ in range(CASES):
        _copied(source, folder)
        changed, change = _changed(fields, drawn)
        write_manifest(folder, changed)
        refused += _read(readers, folder, change) > 0
    assert refused > CASES // 2


def _of_format_2(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_bytes().partition(b"\n")[2])


def _with_header(path: Path, header: bytes) -> None:
    """Replace the header of a file."""
    data = path.read_bytes()
    elements = data[8 + int.from_bytes(data[:8], "little") :]
    path.write_bytes(len(header).to_bytes(8, "little") + header + elements)


def _header_of(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def _front_of(path: Path) -> bytes:
    """Return the identity and the checksums."""
    header = _header_of(path)
    return header[: header.index(b"},") + 2]


def _with_header_and_manifest(path: Path, header: bytes) -> None:
    """Replace the header of a file, and its length and checksum in the manifest."""
    _with_header(path, header)
    fields, found = read_manifest(path.parent), sorted(path.parent.glob("part-*"))
    headers = [path.read_bytes()[: 8 + len(_header_of(path))] for path in found]
    fields["files"]["bytes"] = [path.stat().st_size for path in found]
    fields["files"]["headers"] = [*map(len, headers)]
    fields["files"]["crc32c"] = "".join(f"{crc32c(header):08x}" for header in headers)
    write_manifest(path.parent, fields)


@pytest.mark.parametrize("has_front", [False, True])
@pytest.mark.parametrize("rest", [b"[]", b"1", b"{", b"\xff", b"", b'"x":' + b"[" * 9000])
def test_a_header_that_is_not_json_is_an_error_of_dure(tmp_path, has_front, rest):
    _copied(STORED / "format_4" / "sharded", tmp_path / "saved")
    path = tmp_path / "saved" / "part-000001-00000.safetensors"
    _with_header_and_manifest(path, _front_of(path) * has_front + rest)
    with pytest.raises(CheckpointException, match=r"part-000001-00000\.safetensors"):
        load(_state(), checkpoint_id=path.parent, no_dist=True)
    assert _read(OF_SHARDED, path.parent, "the header") > 0


@pytest.mark.filterwarnings("ignore")
def test_any_changed_field_of_a_header_is_read_or_an_error_of_dure(tmp_path):
    """The manifest has the length and the checksum of the changed header."""
    source, folder = STORED / "format_4" / "sharded", tmp_path / "saved"
    drawn, refused = random.Random(SEED), 0
    for _ in range(CASES):
        _copied(source, folder)
        path = folder / f"part-000001-0000{drawn.randrange(2)}.safetensors"
        header, change = _changed(json.loads(_header_of(path)), drawn)
        text = json.dumps(header, separators=(",", ":")).encode()
        _with_header_and_manifest(path, text)
        refused += _read(OF_SHARDED, folder, change) > 0
    assert refused > CASES // 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["weights", "weights_indexed"])
def test_any_changed_field_of_weights_is_read_or_an_error_of_dure(tmp_path, name):
    source, folder = STORED / "format_4" / name, tmp_path / "saved"
    drawn, refused = random.Random(f"{SEED} {name}"), 0
    for _ in range(CASES):
        _copied(source, folder)
        path = drawn.choice(sorted(folder.iterdir()))
        is_index = path.suffix == ".json"
        fields = json.loads(path.read_bytes() if is_index else _header_of(path))
        changed, change = _changed(_unfolded(fields), drawn)
        text = json.dumps(_folded(changed)).encode()
        if is_index:
            path.write_bytes(text)
        else:
            _with_header(path, text)
        refused += _read(OF_WEIGHTS, folder, f"{path.name}: {change}") > 0
    assert refused > CASES // 3


def _unfolded(fields: Any) -> Any:
    """Parse the checksums, which are a text in the metadata."""
    for key in ("metadata", "__metadata__"):
        if "dure" in fields.get(key, {}):
            fields[key]["dure"] = json.loads(fields[key]["dure"])
    return fields


def _folded(fields: Any) -> Any:
    for key in ("metadata", "__metadata__"):
        about = fields.get(key)
        if isinstance(about, dict) and not isinstance(about.get("dure"), str | None):
            about["dure"] = json.dumps(about["dure"])
    return fields


def test_a_header_as_long_as_its_file_is_damage_that_names_the_file(tmp_path):
    path = Checkpointer(tmp_path).save(1, values={"t": torch.ones(2)})
    part, fields = path / "part-000001-00000.safetensors", read_manifest(path)
    fields["files"]["bytes"] = fields["files"]["headers"]
    with part.open("r+b") as file:
        file.truncate(fields["files"]["headers"][0])
    write_manifest(path, fields)
    with pytest.raises(CheckpointDamaged, match=r"part-000001-00000\.safetensors has .* a header"):
        Checkpointer(tmp_path).load(values={"t": torch.zeros(2)})


SIZE = 1 << 19
MANY = {
    "of 500 dimensions": (
        [1] * 499 + [SIZE],
        [[[0, 0, SIZE]]] * 499 + [[[0, 1, SIZE]]],
        [[[1, 0, SIZE]]] * 500,
    ),
    "irregular": (
        [2, SIZE],
        [[[0, 0, SIZE // 2], [1, 0, SIZE // 2]], [[0, 1, SIZE // 2], [0, 1, SIZE // 2]]],
        [[[1, 0, SIZE]], [[2, 0, SIZE]]],
    ),
}


@pytest.mark.parametrize("kind", MANY)
def test_a_small_manifest_that_claims_many_slices_is_refused(tmp_path, kind):
    _copied(STORED / "format_4" / "sharded", tmp_path / "saved")
    shape, offsets, sizes = MANY[kind]
    fields = read_manifest(tmp_path / "saved")
    same = [[0, 0, SIZE]]
    columns = {"offsets": offsets, "sizes": sizes, "files": same, "begins": same, "places": same}
    fields["tensors"]["w"] = {"dtype": "F32", "shape": shape} | columns
    write_manifest(tmp_path / "saved", fields)
    with pytest.raises(CheckpointDamaged, match="of 'w', "):
        catalog_of(tmp_path / "saved").cut("w")


def test_slices_of_one_row_each_that_the_headers_have_no_room_for_are_refused(tmp_path):
    _copied(STORED / "format_4" / "sharded", tmp_path / "saved")
    fields = read_manifest(tmp_path / "saved")
    each, zeros, ones = [[0, 1, SIZE]], [[0, 0, SIZE]], [[1, 0, SIZE]]
    columns = {"offsets": [each], "sizes": [ones], "files": zeros, "begins": zeros, "places": zeros}
    for name in ("w", "x", "y"):
        fields["tensors"][name] = {"dtype": "F32", "shape": [SIZE]} | columns
    write_manifest(tmp_path / "saved", fields)
    wanted = "part-000001-00000.safetensors, whose header is too short"
    found = faults(tmp_path / "saved", catalog_of(tmp_path / "saved"))
    assert wanted in found[0]
    for reader in (OF_SHARDED["convert"], OF_SHARDED["diff"]):
        with pytest.raises(CheckpointDamaged, match=wanted):
            reader(tmp_path / "saved", tmp_path)
