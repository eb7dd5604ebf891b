"""Run all recipes, or those named, and print a table: `make clients`, `python -m tests.clients`."""

from __future__ import annotations

import sys
import time

from tests.clients.recipes import RECIPES, Recipe, check, ways_of


def result_of(recipe: Recipe) -> tuple[str, str]:
    """Run a recipe; return its result for the table, and what went wrong."""
    missing = recipe.missing()
    if missing:
        return "not run", f"not installed: {', '.join(missing)}"
    try:
        check(recipe, recipe.repeats)
    except AssertionError as error:
        return "FAILED", str(error)
    ways = ways_of(recipe)
    names = ", ".join(way.name for way in ways[len(ways) > 1 :])
    return ("passes" if recipe.is_module or recipe.checks_itself else "equal to gloo"), names


def main(names: list[str]) -> int:
    """Run the recipes of these names, or all; return how many were not equal to Gloo."""
    chosen = [r for r in RECIPES if not names or r.name in names]
    rows, troubles = [], []
    for recipe in chosen:
        began = time.monotonic()
        result, note = result_of(recipe)
        version = "-" if result == "not run" else recipe.version()
        print(f"{recipe.name}: {result} ({time.monotonic() - began:.0f} s)", flush=True)
        if result in ("FAILED", "not run"):
            troubles.append(f"--- {recipe.name}: {note}")
            note = ""
        file = recipe.name if recipe.is_module else f"`{recipe.program}.py`"
        rows.append(f"| {version} | {recipe.what} | {file} | {note} | {result} |")
    head = "| Client | What | Program | Dure | Result |\n| --- | --- | --- | --- | --- |"
    print("", head, *rows, sep="\n")
    print("", *troubles, sep="\n")
    return len(troubles)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
