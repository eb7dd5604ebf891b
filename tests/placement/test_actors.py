"""Variables for the actors of Ray."""

import pytest

from dure.errors import UsageError
from dure.placement import System, actor_variables, detect


def test_ranks_of_a_node_follow_each_other_whatever_the_order_of_actors():
    actors = [("b", [1]), ("a", [0]), ("b", [0]), ("a", [1])]
    variables = actor_variables(actors, 29500)
    assert [v["RANK"] for v in variables] == ["1", "2", "0", "3"]
    assert [v["LOCAL_RANK"] for v in variables] == ["1", "0", "0", "1"]
    assert {v["CUDA_VISIBLE_DEVICES"] for v in variables} == {"0,1"}
    assert {(v["MASTER_ADDR"], v["GROUP_WORLD_SIZE"]) for v in variables} == {("b", "2")}


def test_actors_without_gpus_keep_their_order():
    variables = actor_variables([("a", ()), ("a", ())], 1)
    assert [v["RANK"] for v in variables] == ["0", "1"]
    assert "CUDA_VISIBLE_DEVICES" not in variables[0]


def test_variables_are_understood():
    found = detect(actor_variables([("a", ()), ("b", ()), ("b", ())], 29500)[2])
    assert found.system is System.LAUNCHER
    assert (found.member.rank, found.member.local_rank) == (2, 1)
    assert found.endpoint == "a:29500"


@pytest.mark.parametrize("actors", [[], [("a", [0]), ("a", [0])]])
def test_actors_that_cannot_be_numbered_are_refused(actors):
    with pytest.raises(UsageError):
        actor_variables(actors, 1)
