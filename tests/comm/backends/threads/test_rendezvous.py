"""The rendezvous of thread-ranks, tried one step at a time on a single thread."""

from __future__ import annotations

import pytest
import torch

from dure.comm.backends.request import Request
from dure.comm.backends.threads.rendezvous import Arrival, MessageEnd, Rendezvous
from dure.comm.call import Call
from dure.comm.ops import ReduceOp
from dure.errors import Aborted, CommTimeout, Desync, PeerLost
from tests.comm import calls


def _room(n: int) -> Rendezvous:
    room = Rendezvous("g", n)
    assert [room.join() for _ in range(n)] == [False] * (n - 1) + [True]
    return room


def _sum(*values: float) -> Call:
    return calls.all_reduce(torch.tensor(values), ReduceOp.SUM)


def _arrive(room: Rendezvous, rank: int, call: Call) -> Arrival:
    arrival = Arrival(room, rank, call)
    room.arrive(arrival)
    return arrival


def _send(room: Rendezvous, src: int, dst: int, tensor: torch.Tensor, tag: int = 0) -> MessageEnd:
    end = MessageEnd(room, src, "send", tensor, dst, tag, eager=True)
    room.post(end)
    return end


def _receive(
    room: Rendezvous, dst: int, src: int | None, tensor: torch.Tensor, tag: int = 0
) -> MessageEnd:
    end = MessageEnd(room, dst, "recv", tensor, src, tag)
    room.post(end)
    return end


def _error_of(request: Request) -> Exception:
    assert request.done()
    assert request.error is not None
    return request.error


def test_leaving_ends_what_is_pending():
    room = _room(2)
    request = _arrive(room, 0, _sum(1))
    room.leave(0, abort=True)
    assert isinstance(_error_of(request), Aborted)
    with pytest.raises(PeerLost) as info:
        _arrive(room, 1, _sum(1))
    assert info.value.peer == 0


def test_message_is_a_copy():
    room, sent, got = _room(2), torch.ones(1), torch.zeros(1)
    _send(room, 0, 1, sent)
    sent.fill_(5)
    _receive(room, 1, 0, got)
    assert got.item() == 1.0


def test_mail_of_a_rank_that_left_can_still_be_read():
    room, got = _room(2), torch.zeros(1)
    _send(room, 0, 1, torch.ones(1))
    room.leave(0, abort=False)
    _receive(room, 1, 0, got)
    assert got.item() == 1.0
    with pytest.raises(PeerLost):
        _receive(room, 1, 0, got)
    with pytest.raises(PeerLost):
        _send(room, 1, 0, got)


def test_a_send_that_waits_ends_with_its_receive_or_with_its_receiver():
    room, got = _room(2), torch.zeros(1)
    first, second = (MessageEnd(room, 0, "send", torch.ones(1), 1, tag) for tag in (0, 1))
    room.post(first)
    room.post(second)
    assert not first.done()
    _receive(room, 1, 0, got)
    assert first.error is None
    assert first.done()
    assert not second.done()
    room.leave(1, abort=False)
    assert isinstance(_error_of(second), PeerLost)


def test_messages_that_expire_say_what_they_waited_for():
    room = _room(2)
    sent = MessageEnd(room, 0, "send", torch.ones(1), 1, 3)
    room.post(sent)
    awaited = _receive(room, 0, None, torch.ones(1), tag=4)
    for end in (sent, awaited):
        end.expire()
    errors = [_error_of(sent), _error_of(awaited)]
    assert [e.missing for e in errors if isinstance(e, CommTimeout)] == [(1,), ()]


@pytest.mark.parametrize("posted_first", [True, False])
def test_a_message_that_does_not_fit_is_kept_for_a_receive_that_does(posted_first):
    room, got = _room(2), torch.zeros(3)
    if not posted_first:
        _send(room, 0, 1, torch.ones(3))
    wrong = _receive(room, 1, 0, torch.zeros(4))
    right = _receive(room, 1, 0, got)
    if posted_first:
        _send(room, 0, 1, torch.ones(3))
    assert isinstance(_error_of(wrong), Desync)
    assert right.done()
    assert right.error is None
    assert got.tolist() == [1, 1, 1]


def test_tensors_are_let_go_when_their_operation_has_ended():
    room = _room(1)
    arrival = _arrive(room, 0, _sum(1))
    assert arrival._keep is None
