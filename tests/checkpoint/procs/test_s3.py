"""Checkpoints in S3: a local server (moto) stands for it. Ranks and jobs are processes."""

import json
import os
import subprocess
import sys
import textwrap
import urllib.request
from subprocess import PIPE
from typing import Any, NamedTuple

import pytest

from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.needs("S3")

SERVER = """
import sys, time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0)
server.start()
print("port", server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def store():
    """The environment of programs that use the server, which has a bucket `runs`."""
    pipes: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", SERVER], text=True, **pipes) as server:
        line = until(server.stdout.readline)
        while not line.startswith("port"):
            line = server.stdout.readline()
        url = f"http://127.0.0.1:{line.split()[1]}"
        bucket = urllib.request.Request(f"{url}/runs", method="PUT")
        urllib.request.urlopen(bucket, timeout=PATIENCE_S).close()
        yield {
            **os.environ,
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "key",
            "AWS_DEFAULT_REGION": "us-east-1",
        }


# Runs programs one after another, each in a process that is forked from this one, which has
# imported what takes time. Prints the exit code of each, and what it gave to `show`.
HEAD = """
import json, multiprocessing, os, signal, sys, threading, traceback
import s3fs, torch
from dure.checkpoint import *
from dure.checkpoint.fsspec_path import FsspecPath, path_of

def show(value):
    os.write(1, b"shown " + json.dumps(value).encode() + b"\\n")

def run(text, arguments):
    sys.argv = ["program", *arguments]
    exec(text, globals())
"""
DRIVER = (
    HEAD
    + """
for text, arguments in json.load(sys.stdin):
    process = multiprocessing.get_context("fork").Process(target=run, args=(text, arguments))
    process.start()
    process.join()
    os.write(1, b"ended %d\\n" % process.exitcode)
"""
)


class Ended(NamedTuple):
    """A program that has ended."""

    code: int
    shown: Any
    errors: str


def _run(store: dict[str, str], *programs: tuple[str, ...]) -> list[Ended]:
    """Run programs, each with its arguments, to their ends."""
    work = json.dumps([(textwrap.dedent(text), arguments) for text, *arguments in programs])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=work,
        env=store,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    ended: list[Ended] = []
    shown: Any = None
    for line in done.stdout.splitlines():
        kind, _, value = line.partition(" ")
        if kind == "shown":
            shown = json.loads(value)
        elif kind == "ended":
            ended.append(Ended(int(value), shown, done.stderr))
            shown = None
    assert len(ended) == len(programs), done.stderr
    return ended


SAVE = """
saving, model = Checkpointer(sys.argv[1], keep=2), torch.nn.Linear(2, 2, bias=False)
for step in map(int, sys.argv[2:]):
    torch.nn.init.constant_(model.weight, step)
    saving.save(step, model=model)
"""
LOAD = """
loading, model = Checkpointer(sys.argv[1]), torch.nn.Linear(2, 2, bias=False)
step = loading.load(model=model)
show([step, model.weight.tolist(), loading.refused, path_of(sys.argv[1]).names()])
"""
KILLED_SAVE = (
    """
request, left = FsspecPath._call, [int(sys.argv.pop())]
def killing(self, call):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    return request(self, call)
FsspecPath._call = killing
"""
    + SAVE
)


def test_a_run_is_saved_in_one_process_and_loaded_in_another(store):
    url = "s3://runs/plain"
    saved, loaded = _run(store, (SAVE, url, "1", "2", "3"), (LOAD, url))
    assert (saved.code, loaded.code) == (0, 0), loaded.errors
    step, weight, refused, names = loaded.shown
    assert (step, weight, refused) == (3, [[3, 3], [3, 3]], {})
    assert [name[:13] for name in names] == ["000002-step-2", "000003-step-3"]  # and no lock


# After so many requests of a save: the lock is written (3), the slices are uploaded (9), the
# manifest is next (11) and written (12), the oldest checkpoint has lost its manifest (14), and is
# removed (15).
KILLED_AFTER = (3, 9, 11, 12, 14, 15)


def test_a_writer_that_is_killed_leaves_complete_checkpoints_and_the_next_job_saves(store):
    urls = [f"s3://runs/killed-{number}" for number in KILLED_AFTER]
    begin = f"for url in {urls}:\n    run({SAVE!r}, [url, '1', '2'])"
    programs: list[tuple[str, ...]] = [(begin,)]
    later = f"{LOAD}\nfirst = step\nrun({SAVE!r}, [sys.argv[1], '4'])\nrun({LOAD!r}, sys.argv[1:])"
    for url, number in zip(urls, KILLED_AFTER, strict=True):
        programs += [(KILLED_SAVE, url, "3", str(number)), (LOAD, url), (later, url)]
    begun, *others = _run(store, *programs)
    assert begun.code == 0, begun.errors
    steps: list[int] = []
    for killed, loaded, again in zip(*(others[n::3] for n in range(3)), strict=True):
        assert (killed.code, loaded.code, again.code) == (-9, 0, 0), loaded.errors
        step, weight, refused, _ = loaded.shown
        assert weight == [[step, step], [step, step]]
        assert refused == {}
        steps.append(step)
        step, weight, refused, names = again.shown
        assert (step, weight, refused) == (4, [[4, 4], [4, 4]], {})
        complete = [name for name in names if name != ".lock"]
        assert len(complete) == 2  # and nothing else
        assert complete[-1][7:13] == "step-4"
    assert steps == [2, 2, 2, 3, 3, 3]


def test_ranks_save_a_sharded_state_together_and_one_process_loads_it(store, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import torch, dure
            from dure.checkpoint import save
            from dure.tensor import Shard, distribute_tensor, init_device_mesh

            dure.init_process_group()
            mesh = init_device_mesh("cpu", (2,))
            state = {"w": distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])}
            save(state, checkpoint_id="s3://runs/sharded")
            dure.destroy_process_group()
        """)
    )
    launch = [sys.executable, "-m", "dure.cli", "run", "--nproc", "2", str(program)]
    done = subprocess.run(
        launch, env=store, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    load = """
        state = {"w": torch.zeros(3, 2)}
        load(state, checkpoint_id="s3://runs/sharded")
        show([state["w"].tolist(), path_of("s3://runs/sharded").names()])
    """
    (loaded,) = _run(store, (load,))
    weight, names = loaded.shown
    assert weight == [[0, 1], [2, 3], [4, 5]]
    assert [name[-10:] for name in names] == ["ifest.json", "afetensors", "afetensors"]


def test_a_second_job_is_refused_while_the_first_one_runs(store):
    url = "s3://runs/held"
    hold = HEAD + f"run({SAVE!r}, [{url!r}, '1'])\nshow(os.getpid())\nsys.stdin.read()\n"
    pipes: dict[str, Any] = {"stdin": PIPE, "stdout": PIPE}
    with subprocess.Popen([sys.executable, "-c", hold], env=store, text=True, **pipes) as first:
        assert first.stdout.readline() == f"shown {first.pid}\n"
        (second,) = _run(store, (SAVE, url, "2"))
        assert second.code == 1
        assert f"pid {first.pid}" in second.errors
        assert "CheckpointNotWritten" in second.errors
        first.communicate()
        assert first.returncode == 0
    (third,) = _run(store, (SAVE, url, "2"))
    assert third.code == 0, third.errors


def test_a_save_in_the_background_ends_before_the_process(store):
    save = 'async_save({"w": torch.ones(3)}, checkpoint_id="s3://runs/background")'
    load = """
        state = {"w": torch.zeros(3)}
        load(state, checkpoint_id="s3://runs/background")
        show(state["w"].tolist())
    """
    alone = subprocess.run(  # a process of its own, whose end is the interpreter's
        [sys.executable, "-c", HEAD + save],
        env=store,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    (loaded,) = _run(store, (load,))
    assert loaded.shown == [1, 1, 1]


def test_a_bucket_that_does_not_exist_is_named_and_not_made(store):
    for_it, loaded = _run(store, (SAVE, "s3://nobucket/run", "1"), (LOAD, "s3://nobucket/run"))
    assert for_it.code == 1
    assert "CheckpointNotWritten" in for_it.errors
    assert "s3://nobucket/run" in for_it.errors
    assert loaded.shown[0] is None
