"""The table of rules in docs/dtensor.md is what the rules say: `python benchmarks/rules.py`."""

import importlib.util
import sys

from arch.sources import ROOT


def test_the_table_of_rules_is_what_the_rules_say(monkeypatch):
    spec = importlib.util.spec_from_file_location("rules", ROOT / "benchmarks" / "rules.py")
    assert spec is not None
    assert spec.loader is not None
    rules = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "rules", rules)
    spec.loader.exec_module(rules)
    page = (ROOT / "docs" / "dtensor.md").read_text("utf-8")
    stale = set(page.splitlines()) ^ set(rules.page(page).splitlines())
    assert not stale, f"run python benchmarks/rules.py; these rows differ: {sorted(stale)}"
