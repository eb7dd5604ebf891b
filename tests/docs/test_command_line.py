"""docs/reference/cli.md is what scripts/site/commands.py writes: commands and their options."""

import runpy

from tests.docs.snippets import ROOT


def test_page_of_the_commands_is_that_of_the_code() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "site" / "commands.py"))
    page = script["PAGE"].read_text()
    assert page == script["page"](), "run scripts/site/commands.py"
    assert "## dure trace\n" in page
    assert "| `-o, --output <path>` |" in page
