"""Programs of clients give the same numbers with Dure as with torch's Gloo."""

from __future__ import annotations

import pytest

from tests.clients.recipes import RECIPES, Recipe, check

OF_TORCH = [recipe for recipe in RECIPES if not recipe.client]


@pytest.mark.needs("engine")
@pytest.mark.parametrize("recipe", OF_TORCH, ids=lambda recipe: recipe.name)
def test_programs_of_stock_torch(recipe: Recipe) -> None:
    check(recipe, repeats=1)


@pytest.mark.needs("engine")
@pytest.mark.needs("clients")
def test_a_program_that_knows_gloo_only() -> None:
    (recipe,) = (recipe for recipe in RECIPES if recipe.name == "accelerate_ddp")
    check(recipe, repeats=1)
