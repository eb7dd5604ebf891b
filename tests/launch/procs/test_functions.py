"""`dure.spawn`: functions as ranks, in one process that plays a notebook."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from dure.errors import UsageError
from dure.launch.functions import spawn
from tests.launch.procs.launching import Launching
from tests.waiting import PATIENCE_S

NOTEBOOK = """
import json, multiprocessing, os, signal, sys, time
modules, work, *path = sys.argv[1:]
sys.path += path  # of an interpreter that would find neither torch nor Dure by itself
import torch
import dure
from dure.launch import functions

FACTOR = 3
told = {}

class Point:
    def __init__(self, x):
        self.x = x

def total(x):
    dure.init_process_group()
    t = torch.ones(1) * x * FACTOR * (1 + dure.get_rank())
    dure.all_reduce(t)
    torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    print("from", dure.get_rank())
    return Point(t.item())

def fail():
    dure.init_process_group()
    if dure.get_rank() == 1:
        raise ValueError("my bug")
    dure.barrier()

def interrupt():
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)

def raised(call, **options):
    try:
        call(**options)
    except BaseException as error:
        return [type(error).__name__, str(error), str(error.__cause__)]

sys.path += [modules, "."]
import beside
os.chdir(work)
told["fresh"] = functions._why_not_fork()
key = bytes(multiprocessing.current_process().authkey)
for start in ("fork", "spawn"):
    told["beside " + start] = dure.spawn(beside.seen, 1, (Point(3), key), start=start)
def keep_total(name, start):
    points = dure.spawn(total, 2, (5,), start=start)
    told[name] = [[type(point) is Point, point.x] for point in points]

keep_total("fork", "fork")
for start in ("fork", "spawn"):
    told["failed " + start] = raised(dure.spawn, fn=fail, start=start)
told["interrupted"] = raised(dure.spawn, fn=interrupt)
told["lambda"] = dure.spawn(lambda: lambda: 7, 1)[0]()
told["order"] = dure.spawn(lambda: int(os.environ["RANK"]), 3)
told["nothing"] = dure.spawn(lambda: os._exit(0), 1)
told["unsendable"] = raised(dure.spawn, fn=lambda: (i for i in "ab"), nproc=1)
torch.set_num_threads(2)
torch.rand(900, 900) @ torch.rand(900, 900)
told["threads"] = functions._why_not_fork()
torch.ones(1, requires_grad=True).sum().backward()
told["used"] = functions._why_not_fork()
told["refused"] = raised(dure.spawn, fn=total, args=(5,), start="fork")
keep_total("spawn", None)
from dure.testing import accelerator
accelerator.install()
told["device"] = functions._why_not_fork()
print(json.dumps(told))
"""

BESIDE = """
import importlib, multiprocessing, os, pickle, sys

def seen(point, key):
    by_name = pickle.loads(pickle.dumps(point))
    importlib.import_module("later")  # in the working directory
    same_key = multiprocessing.current_process().authkey == key
    return by_name.x, sys.argv, os.environ["PYTHONPATH"], same_key
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cells of a notebook, and return what came of each."""
    program = tmp_path_factory.mktemp("notebook") / "notebook.py"
    program.write_text(NOTEBOOK)
    modules, work = tmp_path_factory.mktemp("modules"), tmp_path_factory.mktemp("work")
    (modules / "beside.py").write_text(BESIDE)
    (work / "later.py").touch()
    (work / "pickle.py").touch()  # which `.` would hide, were it first
    argv = [str(program), str(modules), str(work), *map(os.path.abspath, sys.path)]
    done = subprocess.run(
        [sys._base_executable, *argv],  # pyright: ignore[reportPrivateUsage,reportAttributeAccessIssue]
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "TMPDIR": str(program.parent), "PYTHONPATH": "/nowhere"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *printed, last = done.stdout.splitlines()
    assert list(program.parent.iterdir()) == [program]
    return json.loads(last) | {"printed": sorted(printed), "errors": done.stderr, "argv": argv}


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_results_of_the_notebooks_own_functions_and_classes_come_back(
    told: dict[str, Any], start: str
) -> None:
    assert told[start] == [[True, 45.0], [True, 45.0]]  # 5 * 3 * (1 + 2), of this process's class


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_rank_has_the_callers_modules_arguments_variables_key_and_names_of_main(
    told: dict[str, Any], start: str
) -> None:
    assert told[f"beside {start}"] == [[3, told["argv"], "/nowhere", True]]


def test_what_ranks_print_is_printed_with_the_rank(told: dict[str, Any]) -> None:
    assert told["printed"] == ["[0] from 0"] * 2 + ["[1] from 1"] * 2
    assert "Traceback" not in told["errors"]


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_error_of_a_rank_is_raised_here(told: dict[str, Any], start: str) -> None:
    kind, text, cause = told[f"failed {start}"]
    assert kind == "LaunchError"
    assert "rank 1" in text and "ValueError: my bug" in text
    head, traceback, frame, *_, last = cause.splitlines()
    assert (head, traceback) == ("on rank 1:", "Traceback (most recent call last):")
    assert frame.endswith(", in fail")
    assert last == "ValueError: my bug"


def test_a_way_to_start_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="'forkserver'"):
        spawn(print, start="forkserver")  # pyright: ignore


def test_interrupt_ends_all_ranks(told: dict[str, Any]) -> None:
    assert told["interrupted"] == ["KeyboardInterrupt", "", "None"]


def test_process_is_forked_only_before_autograd_was_used(told: dict[str, Any]) -> None:
    assert told["fresh"] is None
    assert told["used"] == "autograd was used"
    assert told["refused"][0] == "UsageError"
    assert "autograd was used" in told["refused"][1]


def test_process_that_uses_a_device_is_not_forked(told: dict[str, Any]) -> None:
    assert told["device"] == "the device 'sim' is in use"


def test_odd_results(told: dict[str, Any]) -> None:
    assert told["lambda"] == 7
    assert told["order"] == [0, 1, 2]
    assert told["nothing"] == [None]
    assert told["unsendable"][0] == "LaunchError"
    assert "generator" in told["unsendable"][1]


def test_libraries_threads_forbid_a_fork(told: dict[str, Any]) -> None:
    assert "a library has threads of its own" in told["threads"]


LOADER = """
import torch, dure
print("run as", __name__, flush=True)
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, i):
        return i
def load():
    data = torch.utils.data.TensorDataset(torch.arange(2))
    loader = torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context="spawn")
    forking = torch.utils.data.DataLoader(Numbers(), num_workers=1)
    return [int(x) for x, in loader] + [int(x) for x in forking]
print(dure.spawn(load, 1, start="spawn", env={"PYTHONWARNINGS": "error::RuntimeWarning"}))
"""


def test_program_runs_once_however_ranks_start_their_workers(job: Launching) -> None:
    done = job.finish(job.start_any(sys.executable, job.write(LOADER)))
    assert (done.out, done.err) == ("run as __main__\n[[0, 1, 0, 1]]\n", "")


BADLY_GUARDED = """
import multiprocessing, dure
if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=print)
    worker.start()
    worker.join()
else:
    dure.spawn(print, 1)
"""


def test_spawn_in_a_worker_that_still_imports_its_main_module_is_refused(job: Launching) -> None:
    done = job.finish(job.start_any(sys.executable, job.write(BADLY_GUARDED)))
    assert "UsageError: this process has not yet imported its main module" in done.err


KERNEL = """
from jupyter_client.manager import start_new_kernel

CELL = '''
import dure
def f():
    dure.init_process_group()
    return dure.get_rank()
assert dure.spawn(f, 2) == [0, 1]
'''
kernel, client = start_new_kernel()
try:
    reply = client.execute_interactive(CELL)
    assert reply["content"]["status"] == "ok", reply
finally:
    client.stop_channels()
    kernel.shutdown_kernel(now=True)
"""


CHILD_OF_A_RANK = """
import multiprocessing, time
import dure

def rank():
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    print("started", child.pid)
    child.join()

dure.spawn(rank, 1, start="fork")
"""


def test_children_of_forked_ranks_end_with_a_killed_notebook(job: Launching) -> None:
    """A copy of the launcher's descriptors in them would hide its death from the reaper."""
    notebook = job.start_any(sys.executable, job.write(CHILD_OF_A_RANK))
    assert "started" in notebook.stdout.readline()
    notebook.kill()
    job.wait_until_gone()
    assert job.run("-n", "1", job.write("")).code == 0  # which removes the notebook's folder


def test_cell_of_a_kernel() -> None:
    pytest.importorskip("ipykernel")
    subprocess.run([sys.executable, "-c", KERNEL], check=True, timeout=PATIENCE_S)
