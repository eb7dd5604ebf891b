"""The recorder of communication, on thread-ranks."""

import torch

import dure
from dure.testing import run_ranks
from dure.testing.recorder import CommRecorder


def test_recorder_sees_only_its_own_rank_of_3():
    def program(rank):
        with CommRecorder() as seen:
            dure.all_reduce(torch.ones(4))
            dure.broadcast(torch.ones(3, dtype=torch.float64), src=2)
        dure.barrier()
        return seen.ops, seen.nbytes(), seen.nbytes("broadcast"), {e.rank for e in seen.events}

    for rank, (ops, total, broadcast, ranks) in enumerate(run_ranks(3, program)):
        assert ops == ["all_reduce", "broadcast"]
        assert (total, broadcast) == (16 + 24, 24)
        assert ranks == {rank}


def test_recorder_counts_async_operations_once_in_the_order_of_the_calls():
    def program(rank):
        with CommRecorder() as seen:
            works = [dure.all_reduce(torch.ones(2), async_op=True) for _ in range(3)]
            dure.barrier()
            for work in works:
                work.wait()
        return seen

    for seen in run_ranks(2, program):
        assert seen.ops == ["all_reduce"] * 3 + ["barrier"]
        assert seen.counts == {"all_reduce": 3, "barrier": 1}
        assert [e.async_op for e in seen.events] == [True, True, True, False]


def test_recorder_can_listen_to_one_group():
    def program(rank):
        pair = dure.new_group([0, 1])
        with CommRecorder(group=pair.group_name) as seen:
            dure.all_reduce(torch.ones(1))
            dure.all_reduce(torch.ones(1), group=pair)
        return [e.group for e in seen.events] == [pair.group_name]

    assert run_ranks(2, program) == [True, True]
