"""The flags against torch's own parser, and the page that lists them."""

from __future__ import annotations

import re
from argparse import Action
from pathlib import Path

import pytest
from torch.distributed.argparse_util import check_env, env
from torch.distributed.launch import parse_args as parse_legacy
from torch.distributed.run import get_args_parser

from dure.cli.run.flags import run_parser

LAUNCH_PAGE = Path(__file__).parents[3] / "docs" / "launch.md"
ACTIONS = [x for x in get_args_parser()._actions if x.option_strings and x.dest != "help"]


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.dest)
def test_every_flag_of_torchrun_is_known(action: Action) -> None:
    parser = run_parser()
    ours = {parser.spellings[text.replace("_", "-")] for text in action.option_strings}
    assert len(ours) == 1
    flag = ours.pop()
    assert (flag.nargs == 0) == (action.nargs == 0)
    has_variable = isinstance(action, env | check_env)
    assert (parser.variables.get(f"PET_{action.dest.upper()}") is flag) == has_variable


def test_only_torchruns_flags_have_variables() -> None:
    known = {f"PET_{action.dest.upper()}" for action in ACTIONS}
    assert run_parser().variables.keys() <= known
    assert parse_legacy(["--use-env", "x"]).use_env  # of torch's older launcher
    assert "--use-env" in run_parser().spellings


def test_the_page_about_launching_lists_every_flag() -> None:
    rows = [line for line in LAUNCH_PAGE.read_text().splitlines() if line.startswith("| `-")]
    parser = run_parser()
    variables = {action.dest: name for name, action in parser.variables.items()}
    for action in set(parser.spellings.values()) - {parser.spellings["--help"]}:
        spelling = action.option_strings[-1]
        found = [row for row in rows if spelling in re.split("[`, ]+", row.split("` |")[0])]
        variable = variables.get(action.dest)
        assert any(variable is None or f"| `{variable}` |" in row for row in found), spelling
