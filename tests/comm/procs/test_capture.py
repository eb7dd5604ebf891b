"""Operations that write into tensors: refused in graphs, run between graphs by torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import dure as dist
from dure.comm import functional as F
from dure.errors import UsageError
from dure.testing import ProcessPool

pytestmark = pytest.mark.needs("engine")


def _two() -> list[torch.Tensor]:
    return [torch.ones(2), torch.ones(2)]


OPERATIONS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(2)),
    "broadcast": lambda: dist.broadcast(torch.ones(2), 0),
    "reduce": lambda: dist.reduce(torch.ones(2), 0),
    "all_gather": lambda: dist.all_gather(_two(), torch.ones(2)),
    "all_gather_single": lambda: dist.all_gather_into_tensor(torch.ones(4), torch.ones(2)),
    "reduce_scatter": lambda: dist.reduce_scatter(torch.ones(2), _two()),
    "reduce_scatter_single": lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(4)),
    "all_to_all": lambda: dist.all_to_all(_two(), _two()),
    "all_to_all_single": lambda: dist.all_to_all_single(torch.ones(2), torch.ones(2)),
    "send": lambda: dist.send(torch.ones(2), 1 - dist.get_rank()),
    "irecv": lambda: dist.irecv(torch.ones(2), 1 - dist.get_rank()),
}


def _refused(rank: int, name: str) -> None:
    run = OPERATIONS[name]
    with FakeTensorMode(), pytest.raises(UsageError) as fake:
        run()
    with pytest.raises(UsageError) as captured:
        make_fx(lambda x: (run(), x + 1)[1])(torch.ones(2))
    with pytest.raises(UsageError) as traced:
        torch.jit.trace(lambda x: (run(), x + 1)[1], torch.ones(2), check_trace=False)
    for error in (fake.value, captured.value, traced.value):
        assert error.op == name
        assert "functional" in str(error)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_in_place_is_refused_by_name(process_pool, name):
    process_pool(2, "shm").run(_refused, name)


def _reduce(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def _gather(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty(2 * x.numel())
    dist.all_gather_into_tensor(y, x * 2)
    return y + 1


def _method(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    dist.group.WORLD.all_reduce(y)
    return y + 1


def _compiled(rank: int, program: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, ...]:
    torch._dynamo.reset()
    x = torch.tensor([rank + 1.0])
    breaks = torch._dynamo.explain(program)(x).graph_break_count
    torch._dynamo.reset()
    return breaks, torch.compile(program, backend="eager")(x).tolist()


@pytest.mark.parametrize(
    ("program", "result"),
    [(_reduce, [7.0]), (_gather, [3.0, 5.0]), (_method, [7.0])],
)
def test_compiled_program_runs_it_between_two_graphs(process_pool, program, result):
    assert process_pool(2, "shm").run(_compiled, program) == [(1, result)] * 2


def _questions(x: torch.Tensor) -> torch.Tensor:
    assert dist.is_initialized() and dist.get_backend() == "shm"
    x = x + 10 * dist.get_rank() + 100 * dist.get_world_size()
    return x + 1000 * len(dist.get_process_group_ranks())


def _asked(rank: int, folder: str) -> list[float]:
    """Compile questions about the default group, and ask the next default group as well."""
    torch._dynamo.reset()
    dist.destroy_process_group()
    compiled, found = torch.compile(_questions, backend="eager", fullgraph=True), []
    for size in (2, 1):
        if rank < size:
            at = f"file://{folder}/{size}"
            dist.init_process_group("shm", at, rank=rank, world_size=size)
            found.append(compiled(torch.zeros(1)).item())
            dist.destroy_process_group()
    return found


def test_fullgraph_takes_questions_about_the_default_group_and_notes_another_one(tmp_path):
    with ProcessPool(2, "shm") as pool:
        assert pool.run(_asked, str(tmp_path)) == [[2200.0, 1100.0], [2210.0]]


def _whole(rank: int) -> None:
    torch._dynamo.reset()
    for program in (_reduce, _gather):
        compiled = torch.compile(program, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"dure\.comm\.functional"):
            compiled(torch.ones(1))
    y = F.all_reduce(torch.ones(1), "sum")
    compiled = torch.compile(lambda y: y * 2, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="wait_tensor"):
        compiled(y)
    assert compiled(F.wait_tensor(y)).item() == 4


def test_fullgraph_names_what_to_use(process_pool):
    process_pool(2, "shm").run(_whole)
