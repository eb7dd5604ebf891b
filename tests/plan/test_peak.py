"""Peak memory of a rank: each part by hand."""

from typing import Any

import pytest

from dure.plan.cost import Jobs
from dure.plan.peak import peak_memory
from tests.plan.reckoned import FREE, JOB


def memory_of(constants=FREE, **job):
    found = peak_memory(Jobs.of([JOB | job]), constants)
    return {name: float(each[0]) for name, each in found.items()}


@pytest.mark.parametrize(
    ("job", "parameters", "gradients", "optimizer"),
    [
        ({}, 2, 2 + 4, 12),  # what a backward pass leaves, and their float32 sum
        ({"grad_bytes": 2}, 2, 2, 12),
        ({"dp": 4, "zero": 1}, 2, 6, 3),
        ({"dp": 4, "zero": 3, "shard": 4}, 1, 1, 2),  # float32 parameters are the copy
        ({"dp": 4, "zero": 3, "shard": 2}, 2, 2, 4),  # hybrid
        ({"param_bytes": 4, "master_bytes": 0}, 4, 4, 8),
    ],
)
def test_bytes_of_a_parameter(job, parameters, gradients, optimizer):
    found = memory_of(**job)
    each = [found[name] / 220_000 for name in ("parameters", "gradients", "optimizer")]
    assert each == pytest.approx([parameters, gradients, optimizer])


def test_activations_are_those_of_the_formula_and_live_along_the_pipeline():
    # One token of a layer: 6 w + 2 + 2 k + heads, 2 units of the MLP; 2 bytes.
    token = 2 * (600 + 2 + 200 + 10 + 800)
    assert memory_of(layers=4)["activations"] == pytest.approx(4 * 1000 * token)
    job = {"layers": 8, "vocab": 1e-6}
    alone = memory_of(**job)["activations"]
    first = memory_of(**job, pp=4, microbatches=16)["activations"]
    assert first == pytest.approx(alone)  # a quarter of the layers, of four microbatches
    few = memory_of(**job, pp=4, microbatches=2)["activations"]
    assert few == pytest.approx(alone / 2)


def test_a_recomputed_layer_keeps_its_input_and_one_layer_is_computed_again():
    token = 2 * (600 + 2 + 200 + 10 + 800)
    found = memory_of(layers=4, recompute=1)["activations"]
    assert found == pytest.approx(1000 * (4 * 2 * 100 + 2 * token))


def test_gradients_of_fsdp_are_whole_while_they_are_added_up():
    fsdp: dict[str, Any] = {"dp": 4, "zero": 2, "shard": 4}
    one = memory_of(**fsdp, once=1)["gathered"]
    several = memory_of(**fsdp, once=1, microbatches=2)["gathered"]
    assert one == pytest.approx(2 * 220_000)
    assert several - one == pytest.approx(4 * 220_000)
    assert memory_of(**fsdp, shared=1)["gathered"] == 0
