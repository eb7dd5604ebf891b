"""Tensor parallelism over processes: every plan and two axes; a program written for torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dure
from dure.mesh import init_device_mesh
from dure.native import available as native_available
from dure.tensor.parallel import ParallelStyle, parallelize_module
from dure.testing import ProcessPool
from procs.hosts import hosts, start_job, why_not
from ranks.tensor_models import (
    loss_plan,
    small_llama,
    sp_plan,
    tp_plan,
    train,
    trained_alone,
    whole,
)

STEPS = {(1, 4): 2, (2, 2): 20}  # of each mesh
PLANS = tp_plan, sp_plan, loss_plan
PROGRAMS = Path(__file__).parent / "programs"
PROGRAM = PROGRAMS / "llama_for_torch.py"


def trains(rank: int, plan: Callable[[], dict[str, ParallelStyle]]) -> None:
    """Compare a model cut over all ranks, and one over two beside its replica, with a whole one."""
    for shape, steps in STEPS.items():
        expected = trained_alone(steps, heads=8, kv_heads=4)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        model = parallelize_module(small_llama(False, 8, 4), mesh["tp"], plan())
        ddp = dure.DistributedDataParallel(model, mesh=mesh["dp"])
        replicas, mine = mesh["dp"].size(), mesh["dp"].get_local_rank()

        def shown(loss: torch.Tensor, mesh=mesh) -> torch.Tensor:
            loss = whole(loss)
            dure.all_reduce(loss, dure.ReduceOp.AVG, group=mesh.get_group("dp"))
            return loss

        losses, grads, weights = train(
            ddp, steps, part=lambda ids, n=replicas, i=mine: ids.chunk(n)[i], shown=shown
        )
        assert losses == pytest.approx(expected[0], rel=1e-12)
        for step, wanted in enumerate(expected[1]):
            for name, grad in wanted.items():
                got = grads[step][f"module.{name}"]
                torch.testing.assert_close(got, grad, rtol=1e-9, atol=1e-12, msg=name)
        for name, weight in expected[2].items():
            got = weights[f"module.{name}"]
            torch.testing.assert_close(got, weight, rtol=1e-9, atol=1e-10, msg=name)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_llama_trains_over_processes_as_on_one_rank(process_pool, backend):
    pool = process_pool(4, backend)
    for plan in PLANS:
        pool.run(trains, plan)


@pytest.mark.skipif(not native_available()[0], reason=native_available()[1] or "no engine")
def test_a_llama_trains_over_hosts_as_on_one_rank():
    """Two hosts, which are only pretended; each has a replica, or half of the model."""
    with ProcessPool(4, None, hosts="aabb") as pool:
        assert set(pool.run(_backend)) == {"hybrid"}
        for plan in PLANS:
            pool.run(trains, plan)


def _backend(rank: int) -> str:
    return dure.get_backend()


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
@pytest.mark.skipif(not native_available()[0], reason=native_available()[1] or "no engine")
def test_a_llama_trains_over_namespaces_as_on_one_rank(tmp_path):
    """Two hosts that are network namespaces, two ranks each."""
    with hosts(2) as made:
        program = [PROGRAMS / "llama_over_hosts.py", tmp_path]
        ranks = start_job(made, 2, program, tmp_path / "key")
        ends = [(r.communicate(timeout=100)[1], r.returncode) for r in ranks]
    assert [code for _, code in ends] == [0] * len(ends), ends
    passed = {path.name for path in tmp_path.glob("passed-*")}
    assert passed == {f"passed-{rank}-hybrid" for rank in range(4)}


# ---- a program written for torch -----------------------------------------------------------------


def _for_dure(folder: Path) -> Path:
    """Return a copy of the program with its imports changed, and nothing else."""
    text = PROGRAM.read_text()
    changed = text.replace("import torch.distributed as dist", "import dure as dist")
    changed = changed.replace("from torch.distributed.", "from dure.")
    pairs = zip(text.splitlines(), changed.splitlines(), strict=True)
    assert all(" import " in f" {old}" for old, new in pairs if old != new)
    path = folder / "program.py"
    path.write_text(changed)
    return path


def _check(folder: Path) -> None:
    """Compare the losses of all ranks and ways to cut the model with those of one process."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert len(found) == 4
    for losses in found:
        assert sorted(losses) == ["0", "2", "4"]
        for tp in ("2", "4"):
            assert losses[tp] == pytest.approx(losses["0"], rel=1e-5)


def test_a_program_for_torch_runs_with_its_imports_changed(tmp_path):
    words = ["-m", "dure.cli", "run", "--nproc", "4", _for_dure(tmp_path), tmp_path, "dtensors"]
    job = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=150, check=False
    )
    assert job.returncode == 0, job.stdout + job.stderr
    _check(tmp_path)


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
@pytest.mark.skipif(not native_available()[0], reason=native_available()[1] or "no engine")
def test_a_program_for_torch_runs_over_hosts(tmp_path):
    """Two hosts that are network namespaces, two ranks each; attention on each rank's own heads."""
    program = _for_dure(tmp_path)
    with hosts(2) as made:
        ranks = start_job(made, 2, [program, tmp_path], tmp_path / "key")
        ends = [(r.communicate(timeout=100)[1], r.returncode) for r in ranks]
    assert [code for _, code in ends] == [0] * len(ends), ends
    _check(tmp_path)
