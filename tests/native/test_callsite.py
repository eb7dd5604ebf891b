"""Where a call was made, as text."""

from pathlib import Path

import pytest
import torch

import dure
import dure.comm.codes  # which tells the engine whose folders are whose
from dure.native import call_site

PACKAGE = Path(dure.__file__).parent
TORCH = Path(torch.__file__).parent

pytestmark = pytest.mark.needs("engine")


@pytest.mark.parametrize(
    "path",
    [
        TORCH / "autograd" / "made_up.py",
        *(PACKAGE / part / "made_up.py" for part in ("training", "nn", "parallel/ddp", "elastic")),
    ],
)
def test_the_librarys_own_frames_are_passed_over(path):
    inner = {"call_site": call_site}
    exec(compile("def called(): return call_site()", str(path), "exec"), inner)
    outer = {"called": inner["called"]}
    exec(compile("\n\nsite = called()", "/home/user/train.py", "exec"), outer)
    assert outer["site"] == "/home/user/train.py:3 in <module>"


@pytest.mark.parametrize(
    "path",
    [
        TORCH.parent / "torchvision" / "made_up.py",
        TORCH.parent / "torchtitan" / "train.py",
        TORCH.parent / "torch_scatter.py",
        PACKAGE / "testing" / "made_up.py",
        PACKAGE / "cli" / "made_up.py",
    ],
)
def test_other_packages_and_programs_are_the_users(path):
    scope = {"call_site": call_site}
    exec(compile("site = call_site()", str(path), "exec"), scope)
    told = str(scope["site"]).removeprefix("...")  # of a long path the end
    assert told.partition(":")[0] == str(path)[-len(told.partition(":")[0]) :]
    assert told.endswith(" in <module>") or ":1" in told
