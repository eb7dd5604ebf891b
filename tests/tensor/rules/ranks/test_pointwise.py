"""Pointwise operators: which reductions go through them."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

import pytest
import torch
import torch.nn.functional as F

from dure.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from dure.tensor.debug import CommDebugMode
from tests.thread_ranks import on_ranks

PLACEMENTS = {
    "R": Replicate(),
    "S": Shard(0),
    **{op: Partial(op) for op in ("sum", "avg", "max", "min", "product")},
}
OUTCOMES = {
    "x + y": (torch.add, "sum R sum 0, R sum sum 0, avg R avg 0, R avg avg 0, max R max 0,"
        "min R min 0, R max R 1, max max max 1, sum avg avg 1, sum S S 1, sum product R 2"),
    "x - y": (torch.sub, "sum R sum 0, R sum sum 0, avg R avg 0, max R max 0, R min R 1"),
    "x + 1": (lambda x: x + 1, "sum R 1, avg R 1, max R 1, S S 0"),
    "x * y": (torch.mul, "sum R sum 0, R avg avg 0, sum sum sum 1, max R R 1, S sum S 1"),
    "x / y": (torch.div, "sum R sum 0, R sum R 1"),
    "-x": (torch.neg, "sum sum 0, max min 0, min max 0, product R 1"),
    "relu": (torch.relu, "sum R 1, avg R 1, max max 0, min min 0"),
    "erfc": (torch.erfc, "sum R 1, max min 0, min max 0"),
    "threshold": (lambda x: F.threshold(x, 0.5, 0.0), "max max 0, sum R 1"),
    "threshold up": (lambda x: F.threshold(x, 0.5, 5.0), "max R 1"),
    "clamp": (lambda x: x.clamp(-1, 1), "max R 1, sum R 1, S S 0"),
    "maximum": (torch.maximum, "max R max 0, R min min 0, max max max 0, min min min 1, sum R R 1,"
        "min max max 1"),
    "to float": (lambda x: x.to(torch.float64), "sum sum 0, max max 0, min min 0"),
    "minimum": (torch.minimum, "max R max 0, R min min 0, min min min 0, sum sum R 2"),
    "logaddexp": (torch.logaddexp, "max R max 0, R min min 0, avg R R 1"),
    "where": (lambda x, y: torch.where(x > 0, x, y), "R sum R 1, R S S 0"),
    "amax": (torch.amax, "sum R 1, max max 0"),
    "+=": (lambda x, y: x.add_(y), "sum R sum 0, avg R avg 0, max R max 0, R sum R 1"),
    "*=": (lambda x, y: x.mul_(y), "sum R sum 0, avg R avg 0, sum sum sum 1"),
    "relu_": (torch.relu_, "max max 0, min min 0"),
    "fill_": (lambda x: x.fill_(3.0), "avg avg 0, max max 0"),
    "mul out": (lambda x, y, z: torch.mul(x, y, out=z), "sum R sum sum 0, R sum sum sum 0"),
    "add out": (lambda x, y, z: torch.add(x, y, out=z), "R R avg avg 0, max R max max 0"),
    "exp out": (lambda x, z: torch.exp(x, out=z), "max max max 0, sum R R 1"),
}  # fmt: skip
"""For each operator, placements of its operands and of the result, and how much is sent."""


@pytest.mark.parametrize("name", OUTCOMES)
@on_ranks(2)
def test_terms_become_what_torch_makes_of_them(rank, name):
    operator, lines = OUTCOMES[name]

    mesh = init_device_mesh("cpu", (2,))
    for line in lines.split(","):
        *ways, expected, sent = line.split()
        fulls, parts = [], []
        for number, way in enumerate(ways):
            terms = torch.tensor([[3.0, -1.5], [2, 0.5], [-4, 6]]) + number  # of both ranks
            terms = torch.stack([terms, terms.flip(0) * 0.5])
            reduced = {
                "sum": terms.sum,
                "avg": terms.mean,
                "max": terms.amax,
                "min": terms.amin,
            }
            full = reduced.get(way, terms.prod)(0) if way not in "RS" else terms[0]
            own = full.chunk(2)[rank] if way == "S" else full if way == "R" else terms[rank]
            fulls.append(full.clone())
            whole = {"shape": full.shape, "stride": full.stride()}
            parts.append(DTensor.from_local(own.clone(), mesh, [PLACEMENTS[way]], **whole))
        with CommDebugMode() as counted:
            made = operator(*parts)
        assert made.placements == (PLACEMENTS[expected],), line
        assert counted.get_total_counts() == int(sent), line
        own = operator(*fulls)
        assert torch.allclose(made.full_tensor(), own), line
        shape = own.chunk(2)[rank].shape if expected == "S" else own.shape
        assert made.to_local().shape == shape, line
