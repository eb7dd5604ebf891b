"""`dure bench` for real: every operation is measured and right, and wrong results are an error."""

import json
import os
import subprocess
import sys
from pathlib import Path

from dure.cli.bench.operations import OPERATIONS
from tests.launch.procs.launching import DURE
from tests.waiting import PATIENCE_S

QUICK = ("--ranks", "2", "--samples", "2", "--sample-time", "0.001")


def start(*words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*DURE, "bench", *words, *QUICK],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )


def test_operations_are_measured_and_a_wrong_result_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if any('child.py' in a or 'bench.rank' in a for a in sys.orig_argv):\n"
        "    from dure.comm.group import ProcessGroup\n"
        "    whole = ProcessGroup.broadcast\n"
        "    def off_by_one(self, tensor, *rest, **named):\n"
        "        work = whole(self, tensor, *rest, **named)\n"
        "        tensor[-1] += 1\n"
        "        return work\n"
        "    ProcessGroup.broadcast = off_by_one\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    broken = start("--op", "broadcast", "--sizes", "64", PYTHONPATH=path)
    figures = tmp_path / "figures.json"
    every = start("--op", "all", "--sizes", "4,12K", "--json", str(figures))
    other = ("--dtype", "bfloat16,int8", "--sizes", "1000")
    kinds = start("--op", "all_reduce,reduce_scatter,all_to_all", *other)

    out, err = every.communicate(timeout=PATIENCE_S)
    assert every.returncode == 0, err
    assert "reduce_scatter, float32, 2 ranks: dure shm" in out
    found = json.loads(figures.read_text())
    assert all(found["versions"].values())
    assert {cell["op"] for cell in found["cells"]} == set(OPERATIONS)
    for cell in found["cells"]:
        assert (len(cell["samples_s"]), cell["wrong"]) == (2, 0), cell

    out, err = kinds.communicate(timeout=PATIENCE_S)
    assert kinds.returncode == 0, err
    assert out.count("\n   1000 B") == 6  # a table for each operation and type
    out, err = broken.communicate(timeout=PATIENCE_S)
    assert broken.returncode == 1, (out, err)
    assert "4" in out.split() and "results are wrong" in err
