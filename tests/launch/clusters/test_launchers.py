"""Programs that are launchers themselves."""

from __future__ import annotations

import pytest

from dure.launch import JobSpec
from dure.launch.clusters.launchers import launcher_note


@pytest.mark.parametrize(
    ("program", "args", "kind", "launcher"),
    [
        ("accelerate", ("launch", "train.py"), "script", "accelerate launch"),
        ("/opt/bin/deepspeed", ("train.py",), "executable", "deepspeed"),
        ("torchrun", (), "executable", "torchrun"),
        ("torch.distributed.run", ("train.py",), "module", "torchrun"),
        ("accelerate", ("config",), "executable", ""),
        ("train.py", ("launch",), "script", ""),
        ("package.torchrun", (), "module", ""),
    ],
)
def test_launcher_is_named_in_one_line(program, args, kind, launcher):
    note = launcher_note(JobSpec(program=program, args=args, kind=kind, nproc=2))
    assert note.startswith(f"{launcher} starts ranks itself") if launcher else note == ""
