"""The flags against torch's own parser, and the page that lists them."""

from argparse import Action
from pathlib import Path

from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser

from dure.cli.run.flags import run_parser

LAUNCH_PAGE = Path(__file__).parents[3] / "docs" / "launch.md"
ACTIONS = [x for x in get_args_parser()._actions if x.option_strings and x.dest != "help"]


def test_every_flag_and_variable_of_torchrun_is_known() -> None:
    parser = run_parser()
    for action in ACTIONS:
        (ours,) = {parser.spellings[text.replace("_", "-")] for text in action.option_strings}
        assert (ours.nargs == 0) == (action.nargs == 0), action.dest
        has_variable = isinstance(action, env | check_env)
        assert (parser.variables.get(f"PET_{action.dest.upper()}") is ours) == has_variable
    assert "--use-env" in parser.spellings  # of torch's older launcher


def row(action: Action) -> str:
    """Return the row of a flag in the page's table."""
    usage = ", ".join(action.option_strings) + (f" {action.metavar}" if action.metavar else "")
    names = [name for name, known in run_parser().variables.items() if known is action]
    variable = f"`{names[0]}`" if names and names[0].startswith("PET_") else ""
    usage = usage.replace("|", "\\|")
    return f"| `{usage}` | {variable} | {action.help} |"


def test_the_page_about_launching_has_the_table_of_all_flags() -> None:
    flags = dict.fromkeys(run_parser().spellings.values())
    table = "\n".join(row(action) for action in flags if action.dest != "help")
    assert table in LAUNCH_PAGE.read_text(), f"Put this table into docs/launch.md:\n{table}"
