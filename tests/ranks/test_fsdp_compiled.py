"""Fully sharded training of what torch.compile has compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dure.fsdp import fully_shard
from ranks.fsdp_models import Net, compare, made, making, shard

# The compiler looks at gradients of what is no leaf; ranks that are threads undo its filter.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(params=["gathered", "shared"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()  # pyright: ignore
    yield
    torch._dynamo.reset()  # pyright: ignore


def counting(graphs: list[Any]) -> Any:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def note(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=note, bw_compiler=note)


@pytest.mark.parametrize("when", ["before", "after", "forward"])
def test_blocks_that_are_compiled(way: str, when: str) -> None:
    """`block.compile()` before and after `fully_shard`, and a compiled `forward`."""
    graphs: list[Any] = []

    def prepare(model: Net) -> None:
        with making:  # ranks are threads, the compiler is one
            for block in model.blocks:
                if when == "before":
                    block.compile(backend=counting(graphs))
                elif when == "forward":
                    block.forward = torch.compile(block.forward, backend=counting(graphs))
        shard(model)
        if when == "after":
            for block in model.blocks:
                block.compile(backend=counting(graphs))

    compare(way, 2, prepare=prepare)
    assert len(graphs) >= 4


@pytest.mark.parametrize("first", ["compile", "shard"])
def test_modules_around_which_torch_compile_was_put(way: str, first: str) -> None:
    """Sharded as a whole, or what is within."""
    graphs: list[Any] = []

    def make() -> Net:
        model = made()
        with making:
            for number, block in enumerate(model.blocks):
                wrapped: Any = torch.compile(block, backend=counting(graphs))
                model.blocks[number] = wrapped
        return model

    def prepare(model: Net) -> None:
        for block in model.blocks:
            fully_shard(block if first == "compile" else block._orig_mod)
        fully_shard(model)

    compare(way, 2, prepare=prepare, make=make)
    assert len(graphs) >= 4
