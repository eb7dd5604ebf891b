"""The rendezvous of thread-ranks, tried one step at a time on a single thread."""

from __future__ import annotations

import threading

import pytest
import torch

from dure.comm import call as calls
from dure.comm.backends.request import Request
from dure.comm.backends.threads.rendezvous import Message, Receive, Rendezvous
from dure.comm.call import Call
from dure.comm.ops import ReduceOp
from dure.errors import Aborted, CommTimeout, Desync, PeerLost


def _room(n: int) -> Rendezvous:
    room = Rendezvous("g", n)
    for rank in range(n):
        room.join(rank)
    assert room.everyone_here.is_set()
    return room


def _sum(*values: float) -> Call:
    return calls.all_reduce(torch.tensor(values), ReduceOp.SUM)


def _arrive(room: Rendezvous, rank: int, call: Call) -> Request:
    request = Request()
    room.arrive(rank, call, request)
    return request


def _error_of(request: Request) -> Exception:
    assert request.done()
    assert request.error is not None
    return request.error


def test_last_to_arrive_ends_the_collective():
    room, made = _room(2), [_sum(1), _sum(2)]
    first = _arrive(room, 0, made[0])
    assert not first.done()
    second = _arrive(room, 1, made[1])
    assert first.done()
    assert second.done()
    assert (first.error, second.error) == (None, None)
    assert [c.outputs[0].item() for c in made] == [3.0, 3.0]


def test_ranks_may_run_ahead_of_each_other():
    room, ahead, behind = _room(2), [_sum(1), _sum(10)], [_sum(2), _sum(20)]
    first, second = (_arrive(room, 0, c) for c in ahead)
    _arrive(room, 1, behind[0])
    assert first.done()
    assert not second.done()
    _arrive(room, 1, behind[1])
    assert [c.outputs[0].item() for c in ahead] == [3.0, 30.0]


def test_mismatch_fails_all_and_touches_no_data():
    room, good, bad = _room(2), _sum(1), _sum(1, 2)
    request = _arrive(room, 0, good)
    _arrive(room, 1, bad)
    error = _error_of(request)
    assert isinstance(error, Desync)
    assert set(error.calls) == {0, 1}
    assert good.outputs[0].item() == 1.0
    with pytest.raises(Desync):
        _arrive(room, 0, _sum(1))


def test_expired_collective_names_the_missing():
    room = _room(3)
    request = Request()
    room.expire(room.arrive(1, _sum(1), request))
    error = _error_of(request)
    assert isinstance(error, CommTimeout)
    assert error.missing == (0, 2)


def test_leaving_ends_what_is_pending():
    room = _room(2)
    request = _arrive(room, 0, _sum(1))
    room.leave(0, abort=True)
    assert isinstance(_error_of(request), Aborted)
    with pytest.raises(PeerLost) as info:
        _arrive(room, 1, _sum(1))
    assert info.value.peer == 0


def test_thread_that_ended_without_a_word_is_lost():
    room = Rendezvous("g", 2)
    room.join(0)
    thread = threading.Thread(target=room.join, args=(1,))
    thread.start()
    thread.join()
    request = _arrive(room, 0, _sum(1))
    room.lose_ended_threads()
    error = _error_of(request)
    assert isinstance(error, PeerLost)
    assert error.peer == 1


def test_message_before_and_after_its_receive():
    room, early, late = _room(2), torch.zeros(1), torch.zeros(1)
    room.send(1, Message(0, 7, torch.ones(1)))
    room.post(1, Receive(early, 0, 7))
    receive = Receive(late, None, 7)
    room.post(1, receive)
    assert not receive.request.done()
    room.send(1, Message(0, 7, torch.ones(1) * 2))
    assert (early.item(), late.item(), receive.request.source) == (1.0, 2.0, 0)


def test_message_is_a_copy():
    room, sent, got = _room(2), torch.ones(1), torch.zeros(1)
    room.send(1, Message(0, 0, sent))
    sent.fill_(5)
    room.post(1, Receive(got, 0, 0))
    assert got.item() == 1.0


def test_message_of_another_length_is_a_desync():
    room, receive = _room(2), Receive(torch.zeros(3), 0, 0)
    room.post(1, receive)
    room.send(1, Message(0, 0, torch.zeros(2)))
    assert isinstance(receive.request.error, Desync)


def test_mail_of_a_rank_that_left_can_still_be_read():
    room, got = _room(2), torch.zeros(1)
    room.send(1, Message(0, 0, torch.ones(1)))
    room.leave(0, abort=False)
    room.post(1, Receive(got, 0, 0))
    assert got.item() == 1.0
    with pytest.raises(PeerLost):
        room.post(1, Receive(got, 0, 0))
    with pytest.raises(PeerLost):
        room.send(0, Message(1, 0, got))


@pytest.mark.parametrize("posted_first", [True, False])
def test_a_message_that_does_not_fit_is_kept_for_a_receive_that_does(posted_first):
    room, got = _room(2), torch.zeros(3)
    wrong, right = Receive(torch.zeros(4), 0, 0), Receive(got, 0, 0)
    if posted_first:
        room.post(1, wrong)
        room.post(1, right)
    room.send(1, Message(0, 0, torch.ones(3)))
    if not posted_first:
        room.post(1, wrong)
        room.post(1, right)
    assert wrong.request.done()
    assert isinstance(wrong.request.error, Desync)
    assert right.request.done()
    assert right.request.error is None
    assert got.tolist() == [1, 1, 1]
