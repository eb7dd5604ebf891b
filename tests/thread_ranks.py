"""Tests whose function is what each of several thread-ranks does."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

from dure.mesh import init_device_mesh
from dure.testing import run_ranks

Test = Callable[..., Any]


def on_ranks(n: int, **options: Any) -> Callable[[Test], Test]:
    """Run a test on `n` thread-ranks; its first argument is the rank.

    The other arguments come from pytest, the very same objects on all ranks.

    Args:
        n: How many ranks.
        options: Of `run_ranks`.
    """

    def decorate(test: Test) -> Test:
        return _without_first(test, lambda call: run_ranks(n, call, **options))

    return decorate


def on_mesh(*sizes: int, names: tuple[str, ...] | None = None) -> Callable[[Test], Test]:
    """Run a test on the thread-ranks of a mesh, with its names; its first argument is the mesh."""

    def decorate(test: Test) -> Test:
        def run(call: Callable[[Any], None]) -> None:
            run_ranks(
                math.prod(sizes),
                lambda rank: call(init_device_mesh("cpu", sizes, mesh_dim_names=names)),
            )

        return _without_first(test, run)

    return decorate


def _without_first(test: Test, run: Callable[[Callable[[Any], None]], object]) -> Test:
    """Return a test without the first argument, which `run` gives in its place."""
    signature = inspect.signature(test)

    @functools.wraps(test)
    def whole(**given: Any) -> None:
        run(lambda first: test(first, **given))

    own = list(signature.parameters.values())[1:]
    whole.__signature__ = signature.replace(parameters=own)  # pyright: ignore
    return whole
