"""The table of flags against torch's own parser, and the pages that list them."""

from __future__ import annotations

import re
from argparse import Action
from pathlib import Path

import pytest
from torch.distributed.argparse_util import check_env, env
from torch.distributed.launch import parse_args as parse_legacy
from torch.distributed.run import get_args_parser

from dure.cli.run import flags
from dure.cli.run.flags import FLAGS, Flag, find

LAUNCH_PAGE = Path(__file__).parents[3] / "docs" / "launch.md"
HELP = Path(flags.__file__).with_name("help.txt")
ACTIONS = [x for x in get_args_parser()._actions if x.option_strings and x.dest != "help"]


def flag_of(action: Action) -> Flag:
    longest = max(action.option_strings, key=len)
    flag = find(longest)
    assert flag is not None, f"torchrun's {longest} is missing in dure.cli.run.flags"
    return flag


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.dest)
def test_every_flag_of_torchrun_is_in_the_table(action: Action) -> None:
    flag = flag_of(action)
    assert flag.torchruns in action.option_strings
    assert {find(text) for text in action.option_strings} == {flag}
    assert (flag.parse is None) == (action.nargs == 0)
    from_environment = isinstance(action, env | check_env)
    assert flag.variable == (f"PET_{action.dest.upper()}" if from_environment else "")


def test_torchruns_flags_are_torchruns() -> None:
    known = {text for action in ACTIONS for text in action.option_strings}
    assert {flag.torchruns for flag in FLAGS if flag.torchrun} - known == {"--use-env"}
    assert parse_legacy(["--use-env", "x"]).use_env


def test_no_spelling_has_two_meanings() -> None:
    spellings = [text for flag in FLAGS for text in flag.spellings.split()]
    assert len(set(spellings)) == len(spellings)
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)


def test_help_and_the_page_about_launching_tell_of_every_flag() -> None:
    lines = [line for line in HELP.read_text().splitlines() if line.startswith("  -")]
    heads = [line[2:].partition("  ")[0] for line in lines]
    told = [word for head in heads for word in re.split("[ ,]+", head) if word[:1] == "-"]
    assert sorted(told) == sorted(text for flag in FLAGS for text in flag.spellings.split())
    page = LAUNCH_PAGE.read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `-")]
    for flag in FLAGS:
        spelling = flag.torchruns or flag.spellings.split()[-1]
        told_at = [row for row in rows if spelling in re.split("[`, ]+", row.split("` |")[0])]
        assert any(not flag.pet or f"| `{flag.variable}` |" in row for row in told_at), spelling
