"""The cost model: each part by hand, for jobs small enough to be reckoned on paper."""

from typing import Any

import pytest

from dure.plan.constants import Constants
from dure.plan.cost import Jobs, step_time
from dure.plan.peak import peak_memory
from tests.plan.reckoned import FREE, JOB


def time_of(constants=FREE, **job):
    jobs = Jobs.of([JOB | job])
    return {name: float(each[0]) for name, each in step_time(jobs, constants).items()}


def test_products_are_six_flops_a_weight_and_token_and_two_more_where_recomputed():
    weights = 4 * 100 * 100 + 2 * 100 * 400
    assert time_of()["products"] == pytest.approx(6 * weights * 1000 / 1e12)
    again = time_of(FREE.replaced({"recompute": 1.0}), recompute=1)["products"]
    assert again == pytest.approx(8 * weights * 1000 / 1e12)


def test_fused_attention_is_half_of_the_square_and_otherwise_scores_cross_the_memory():
    flops = 4 * 1000 * 1000 * 100
    assert time_of()["attention"] == pytest.approx(3.5 * flops / 2 / 1e12)
    c = FREE.replaced({"scores_passes": 8.0})
    scores = 8 * 2 * 10 * 1000 * 1000 / 1e11
    assert time_of(c, fused=0)["attention"] == pytest.approx(3.5 * (flops / 1e12 + scores))


@pytest.mark.parametrize(("tp", "per_layer"), [(1, 0), (2, 4 * 1e-5), (4, 4 * 1.5e-5)])
def test_tensor_parallelism_takes_four_all_reduces_a_layer(tp, per_layer):
    # 200,000 bytes: twice (n - 1) / n of them over 10 GB/s is 20 us of 2 ranks, 30 of 4;
    # the vocabulary's product is not counted.
    assert time_of(tp=tp, layers=8)["tp"] == pytest.approx(8 * per_layer * 2)


def test_an_all_reduce_over_nodes_shares_their_cards():
    # 8 replicas, 4 a node: 4 bytes of 220,000 parameters. In the node 2 * 3/4, over two nodes
    # 2 * 1/2 of them through four cards of 1 GB/s.
    size = 4 * (120_000 + 100_000)
    expected = size * 1.5 / 1e10 + size / 4e9
    assert time_of(dp=8)["dp"] == pytest.approx(expected)
    assert time_of(dp=8, zero=1)["dp"] == pytest.approx(expected * 0.75)  # weights take 2 bytes


def test_sharded_parameters_are_gathered_twice_and_gradients_scattered_each_time_or_once():
    gather, scatter = 2 * 220_000 * 0.75 / 1e10, 4 * 220_000 * 0.75 / 1e10
    fsdp: dict[str, Any] = {"dp": 4, "zero": 3, "shard": 4, "microbatches": 5}
    fsdp["peak"] = 1e20  # nothing to hide behind
    assert time_of(**fsdp)["dp"] == pytest.approx(5 * (2 * gather + scatter))
    assert time_of(**fsdp, once=1)["dp"] == pytest.approx(5 * 2 * gather + scatter)
    assert time_of(**fsdp, shared=1)["dp"] == pytest.approx(5 * scatter)
    assert time_of(**{**fsdp, "zero": 2})["dp"] == pytest.approx(5 * (gather + scatter))


def test_gradients_in_buckets_hide_behind_the_backward_pass():
    # 4 replicas in a node: 880,000 bytes twice 3/4 over 10 GB/s, 0.13 ms; the backward pass 1.1 ms.
    seen = 880_000 * 1.5 / 1e10
    c = FREE.replaced({"overlap": 1.0})
    assert time_of(c, dp=4)["dp"] == pytest.approx(seen)
    assert time_of(c, dp=4, bucketed=1)["dp"] < seen / 1000
    assert time_of(dp=4, bucketed=1)["dp"] == pytest.approx(seen)  # nothing of it hides


def test_a_number_and_a_column_of_it_give_the_same():
    job = JOB | {"layers": 9, "pp": 2, "balanced": 1, "dp": 4, "tp": 2, "zero": 3, "shard": 4}
    for found in (step_time, peak_memory):
        plain = found(Jobs(job), Constants.load())
        columns = found(Jobs.of([job, JOB]), Constants.load())
        assert {name: each[0] for name, each in columns.items()} == pytest.approx(plain)


def test_a_bubble_is_the_other_stages_once_and_less_with_more_parts():
    # 8 layers, no vocabulary to speak of: a stage of 2 layers takes a quarter of all.
    job = {"layers": 8, "pp": 4, "microbatches": 16, "vocab": 1e-6}
    found = time_of(**job)
    stage = (found["products"] + found["attention"] + found["elementwise"]) / 16
    assert found["bubble"] == pytest.approx(3 * stage)
    assert time_of(**job, parts=2)["bubble"] == pytest.approx(1.5 * stage)


def test_stages_by_cost_count_the_scores_as_layers():
    layer = 4 * 100 * 100 + 2 * 100 * 400
    jobs = Jobs.of(
        [
            JOB | {"layers": 10, "pp": 2, "balanced": 1, "vocab": 4 * layer / 100},  # 7 each
            JOB | {"layers": 10, "pp": 4, "balanced": 1, "vocab": 2 * layer / 100},  # 3 each
            JOB | {"layers": 10, "pp": 4, "balanced": 1, "vocab": layer / 100},  # 2.75
            JOB | {"layers": 10, "pp": 5, "balanced": 1, "vocab": 0.1 * layer / 100},  # 2.02
            JOB | {"layers": 10, "pp": 4, "vocab": 2 * layer / 100},  # alike, whatever the scores
        ]
    )
    first, last = jobs.stages
    assert first.tolist() == [7, 3, 3, 2, 3]
    assert last.tolist() == [3, 1, 1, 2, 3]


def test_optimizer_moves_thirty_bytes_a_parameter_of_its_own():
    c = FREE.replaced({"adam": 1.0})
    for zero, parts in ((0, 1), (1, 4), (3, 4)):
        seconds = time_of(c, dp=4, zero=zero, shard=4)["optimizer"]
        assert seconds == pytest.approx(30 * 220_000 / parts / 1e11)
