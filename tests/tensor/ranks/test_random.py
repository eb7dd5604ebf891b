"""Random operators give the values of one rank, bit for bit, and leave its generator."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dure.errors import Desync, NotInGroupError, PlacementError
from dure.mesh import DeviceMesh
from dure.tensor import Partial, Replicate, Shard, init_device_mesh
from dure.tensor._random import is_rng_supported_mesh, manual_seed
from dure.testing import CommRecorder, run_ranks
from tests.tensor.ranks.operators import check
from tests.tensor.ranks.parts import made
from tests.thread_ranks import on_mesh, on_ranks

R = Replicate()


def write(x, name, *args):
    y = x.clone()
    getattr(y, name)(*args)
    return y


def init(function, **options):
    def run(x):
        y = x.clone()
        function(y, **options)
        return y

    return run


OPERATORS = {
    "uniform_": lambda x: write(x, "uniform_", 1, 3),
    "normal_": lambda x: write(x, "normal_"),
    "bernoulli_": lambda x: write(x, "bernoulli_", 0.3),
    "random_": lambda x: write(x, "random_", 5, 90),
    "like": lambda x: (torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 9)),
    "bernoulli": lambda x: (x.abs() / 100).bernoulli(),
    "normal": lambda x: torch.normal(x, x.abs()),
    "multinomial": lambda x: x.abs().multinomial(2),
    "dropout": lambda x: F.dropout(x, 0.4),
    "rrelu": lambda x: F.rrelu(x - 5, training=True),
    "gumbel": F.gumbel_softmax,
    "xavier": init(nn.init.xavier_uniform_),
    "trunc_normal": init(nn.init.trunc_normal_, std=2.0),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_values_are_those_of_one_rank(name):
    def draws(x):
        torch.manual_seed(5)
        return OPERATORS[name](x), OPERATORS[name](x)

    # A softmax over a sharded dimension sums in another order.
    tolerance = 1e-6 if name == "gumbel" else 0.0
    x = torch.arange(1.0, 16).reshape(5, 3)
    draws(x)
    state = torch.default_generator.get_state()
    check(draws, x, tolerance=tolerance)
    assert torch.equal(torch.default_generator.get_state(), state)


@on_mesh(2)
def test_values_stay_sharded_and_terms_are_reduced(mesh):
    torch.manual_seed(5)
    x = made(mesh, torch.ones(5, 3), [Shard(0)])
    assert x.normal_() is x
    assert torch.rand_like(x).placements == (Shard(0),)
    assert x.bernoulli(0.3).placements == (Shard(0),)
    terms = made(mesh, torch.full((5, 3), 0.5), [Partial()])
    assert torch.rand_like(terms).placements == (R,)
    assert terms.bernoulli().full_tensor().unique().tolist() == [0, 1]
    with pytest.raises(PlacementError):
        terms.normal_()


@on_ranks(2)
def test_generators_that_differ_are_named(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = made(mesh, torch.ones(4), [R])
    with pytest.raises(Desync, match="axis tp") as caught:
        x.normal_(generator=torch.Generator().manual_seed(rank))
    assert sorted(caught.value.calls) == [0, 1]


PARTS = {
    "normal_": lambda x, generator: x.normal_(generator=generator),
    "bernoulli": lambda x, generator: x.mul_(0.5).bernoulli(generator=generator),
    "normal": lambda x, generator: torch.normal(x, x, generator=generator),
    "multinomial": lambda x, generator: x.multinomial(1, generator=generator),
}


@pytest.mark.parametrize("name", ["normal_", "bernoulli", "normal"])
@on_ranks(2)
def test_parts_are_drawn_from_generators_in_different_states(rank, name):
    mesh = init_device_mesh("cpu", (2,))
    x = made(mesh, torch.ones(5, 3), [Shard(0)])
    generator = torch.Generator().manual_seed(rank)
    with CommRecorder() as recorder:
        part = PARTS[name](x, generator).to_local()
    assert name != "normal_" or not recorder.ops  # only values are sent, nothing is compared
    whole = PARTS[name](torch.ones(5, 3), torch.Generator().manual_seed(rank))
    assert torch.equal(part, whole[3 * rank : 3 + 2 * rank])


@on_ranks(2)
def test_a_replicated_result_of_parts_needs_equal_generators(rank):
    x = made(init_device_mesh("cpu", (2,)), torch.ones(4, 3), [Shard(0)])
    with pytest.raises(Desync):
        PARTS["multinomial"](x, torch.Generator().manual_seed(rank))
    again = PARTS["multinomial"](x, torch.Generator().manual_seed(7))
    assert again.placements == (R,)


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 4)], ids=str)
def test_a_number_that_one_rank_has_drawn_alone_is_noticed_on_all_ranks(sizes):
    def body(rank):
        mesh = init_device_mesh("cpu", sizes)
        generator = torch.Generator().manual_seed(3)
        x = made(mesh, torch.ones(4), [R] * mesh.ndim)
        first = x.clone().bernoulli_(0.5, generator=generator).to_local()
        if rank == 3:
            torch.rand(1, generator=generator)
        with pytest.raises(Desync) as caught:
            x.bernoulli_(0.5, generator=generator)
        states = caught.value.calls
        assert sorted(states) == [0, 1, 2, 3]
        assert states[0] == states[1] == states[2] != states[3]
        assert x.to_local().tolist() == [1, 1, 1, 1]  # not written
        generator.manual_seed(4)
        again = x.bernoulli_(0.5, generator=generator).to_local()
        return first, again

    found = run_ranks(4, body)
    for first, again in found:
        assert torch.equal(first, found[0][0]) and torch.equal(again, found[0][1])


def test_the_seed_of_a_mesh_is_that_of_torch():
    alone = torch.empty(4).normal_(generator=torch.Generator().manual_seed(7))

    def body(rank):
        mesh, outside = init_device_mesh("cpu", (2,)), DeviceMesh("cpu", [0])
        x = made(mesh, torch.zeros(4), [Shard(0)])
        manual_seed(7, mesh)
        assert x.normal_().full_tensor().tolist() == alone.tolist()
        assert is_rng_supported_mesh(mesh)
        if rank:
            with pytest.raises(NotInGroupError):
                manual_seed(7, outside)

    run_ranks(2, body)
