"""`dure checkpoint`: show, verify, diff, consolidate."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dure.checkpoint import HuggingFaceStorageWriter, save
from dure.cli.app import USAGE_EXIT_CODE, run_command_line
from dure.tensor import Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks


def saved(folder, ranks=2, changed=0, **values):
    """Save w [4, 3] of 0, 1, ... in rows of each rank, with `changed` elements 100 more."""
    whole = torch.arange(12.0)
    whole[:changed] += 100

    def body(rank):
        mesh = init_device_mesh("cpu", (ranks,))
        state = {"model": {"w": distribute_tensor(whole.reshape(4, 3), mesh, [Shard(0)])}, **values}
        save(state, checkpoint_id=folder)

    run_ranks(ranks, body)
    return str(folder)


def called(capsys, *words):
    code = run_command_line(["checkpoint", *words])
    out, err = capsys.readouterr()
    return code, out + err


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_show_lists_what_is_there(tmp_path, capsys):
    code, out = called(capsys, "show", saved(tmp_path, step=3, words="x" * 100))
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0 and "model.w F32 [4, 3] 2 48" in lines and "step = 3" in lines
    assert f"words = '{'x' * 59}..." in lines
    assert lines[-1] == "1 tensors in 2 files, 48 bytes; 2 values"


def test_verify_finds_each_file_that_is_changed(tmp_path, capsys):
    folder = saved(tmp_path)
    assert called(capsys, "verify", folder) == (0, "complete: 2 files, 48 bytes\n")
    flipped, short = sorted(tmp_path.glob("part-*"))
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\x7f")
    short.write_bytes(short.read_bytes()[:-1])
    code, out = called(capsys, "verify", folder)
    first, second = out.splitlines()
    assert code == 1 and "model.w[0:2, 0:3]" in first and "checksum is wrong" in first
    assert short.name in second and "truncated" in second


@pytest.mark.parametrize("max_bytes", [10**6, 20])
def test_verify_finds_changed_weights(tmp_path, capsys, max_bytes):
    state = {"v": torch.ones(4), "w": torch.ones(2, 3)}
    save(state, storage_writer=HuggingFaceStorageWriter(tmp_path, max_bytes=max_bytes))
    files = sorted(tmp_path.glob("*.safetensors"))
    code, out = called(capsys, "verify", str(tmp_path))
    assert (code, out) == (0, f"complete: {len(files)} files, 40 bytes\n")
    shown = called(capsys, "show", str(tmp_path))[1]
    assert "v F32 [4] 1 16" in " ".join(shown.split())
    files[-1].write_bytes(files[-1].read_bytes()[:-1] + b"\x7f")
    code, out = called(capsys, "verify", str(tmp_path))
    assert code == 1 and "w" in out and "checksum is wrong" in out


def test_verify_refuses_weights_without_checksums(tmp_path, capsys):
    save_file({"w": torch.ones(3)}, tmp_path / "model.safetensors")
    code, out = called(capsys, "verify", str(tmp_path))
    assert code != 0 and "no checksums" in out


def test_diff_tells_names_values_kinds_and_elements(tmp_path, capsys):
    first = saved(tmp_path / "1", step=3, gone=1, v=torch.zeros(2))
    assert called(capsys, "diff", first, first) == (0, "the same\n")
    other = saved(tmp_path / "2", 3, changed=5, step=4, new=1, v=torch.zeros(3))
    assert called(capsys, "diff", first, other) == (
        1,
        "gone is in the first only\n"
        "new is in the second only\n"
        "model.w differs in 5 of 12 elements\n"
        "step is 3, and 4\n"
        "v is F32[2], and F32[3]\n",
    )
    cut_otherwise = saved(tmp_path / "3", 4, step=3, gone=1, v=torch.zeros(2))
    assert called(capsys, "diff", first, cut_otherwise) == (0, "the same\n")


def test_diff_of_equal_bits_cut_otherwise_is_nothing(tmp_path, capsys):
    nan, inf = float("nan"), float("inf")
    whole = torch.tensor([nan, 0.0, inf, 1.0, nan])

    def body(rank, ranks, values, folder):
        mesh = init_device_mesh("cpu", (ranks,))
        save({"w": distribute_tensor(values, mesh, [Shard(0)])}, checkpoint_id=folder)

    run_ranks(1, body, 1, whole, tmp_path / "1")
    run_ranks(2, body, 2, whole, tmp_path / "2")
    run_ranks(2, body, 2, torch.tensor([nan, -0.0, inf, 2.0, nan]), tmp_path / "3")
    first, second, other = (str(tmp_path / name) for name in "123")
    assert called(capsys, "diff", first, second) == (0, "the same\n")
    assert called(capsys, "diff", first, other) == (1, "w differs in 2 of 5 elements\n")


def test_diff_tells_values_of_other_types_apart(tmp_path, capsys):
    first = saved(tmp_path / "1", 1, a=1, b=1, c=[float("nan")], d=0.0)
    other = saved(tmp_path / "2", 1, a=1.0, b=True, c=[float("nan")], d=-0.0)
    assert called(capsys, "diff", first, other) == (
        1,
        "a is 1, and 1.0\nb is 1, and True\nd is 0.0, and -0.0\n",
    )


def test_consolidate_makes_weights(tmp_path, capsys):
    folder = saved(tmp_path / "1", step=3)
    code, _ = called(capsys, "consolidate", folder, str(tmp_path / "to"), "--prefix", "model.")
    held = load_file(tmp_path / "to" / "model.safetensors")
    assert code == 0 and held["w"].equal(torch.arange(12.0).reshape(4, 3)) and len(held) == 1
    code, out = called(capsys, "consolidate", folder, str(tmp_path / "no"), "--prefix", "module.")
    assert code == USAGE_EXIT_CODE and "begins with 'module.'" in out and "begin with model" in out


def test_what_is_no_checkpoint_is_one_line(tmp_path, capsys):
    code, out = called(capsys, "show", str(tmp_path))
    assert code != 0 and len(out.splitlines()) == 1 and "the folder is empty" in out
    assert called(capsys, "show")[0] == USAGE_EXIT_CODE
    assert called(capsys, "show", str(tmp_path / "none"))[0] == USAGE_EXIT_CODE
    (tmp_path / "file").write_text("")
    assert called(capsys, "show", str(tmp_path / "file"))[0] == USAGE_EXIT_CODE
    assert (
        called(capsys, "consolidate", str(tmp_path), str(tmp_path / "file"))[0] == USAGE_EXIT_CODE
    )
