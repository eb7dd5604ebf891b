"""Where thread-ranks meet, tried one step at a time on a single thread."""

from __future__ import annotations

import threading

import pytest
import torch

from dure.comm.backends.threads.moves import Call
from dure.comm.backends.threads.room import Message, Receive, Room
from dure.comm.ops import ReduceOp
from dure.errors import Aborted, CommTimeout, Desync, PeerLost


def _room(n: int) -> Room:
    room = Room("g", n)
    for rank in range(n):
        room.join(rank)
    assert room.everyone_here.is_set()
    return room


def _sum(*values: float) -> Call:
    both = (torch.tensor(values),)
    return Call(op="all_reduce", inputs=both, outputs=both, reduce=ReduceOp.SUM)


def _error_of(room: Room, rank: int, meeting) -> Exception:
    assert meeting.ended.is_set()
    assert meeting.failure is not None
    return meeting.failure.error(room, rank, "all_reduce", 0.1)


def test_last_to_arrive_ends_the_meeting():
    room, calls = _room(2), [_sum(1), _sum(2)]
    meeting = room.arrive(0, calls[0])
    assert not meeting.ended.is_set()
    assert room.arrive(1, calls[1]) is meeting
    assert meeting.ended.is_set()
    assert meeting.failure is None
    assert [c.outputs[0].item() for c in calls] == [3.0, 3.0]


def test_ranks_may_run_ahead_of_each_other():
    room, ahead, behind = _room(2), [_sum(1), _sum(10)], [_sum(2), _sum(20)]
    first, second = (room.arrive(0, c) for c in ahead)
    room.arrive(1, behind[0])
    assert first.ended.is_set()
    assert not second.ended.is_set()
    room.arrive(1, behind[1])
    assert [c.outputs[0].item() for c in ahead] == [3.0, 30.0]


def test_mismatch_fails_all_and_touches_no_data():
    room, good, bad = _room(2), _sum(1), _sum(1, 2)
    meeting = room.arrive(0, good)
    room.arrive(1, bad)
    error = _error_of(room, 0, meeting)
    assert isinstance(error, Desync)
    assert set(error.calls) == {0, 1}
    assert good.outputs[0].item() == 1.0
    with pytest.raises(Desync):
        room.arrive(0, _sum(1))


def test_expired_meeting_names_the_missing():
    room = _room(3)
    meeting = room.arrive(1, _sum(1))
    room.expire_meeting(meeting)
    error = _error_of(room, 1, meeting)
    assert isinstance(error, CommTimeout)
    assert error.missing == (0, 2)


def test_leaving_ends_what_is_pending():
    room = _room(2)
    meeting = room.arrive(0, _sum(1))
    room.leave(0, abort=True)
    assert isinstance(_error_of(room, 0, meeting), Aborted)
    with pytest.raises(PeerLost) as info:
        room.arrive(1, _sum(1))
    assert info.value.peer == 0


def test_thread_that_ended_without_a_word_is_lost():
    room = Room("g", 2)
    room.join(0)
    thread = threading.Thread(target=room.join, args=(1,))
    thread.start()
    thread.join()
    meeting = room.arrive(0, _sum(1))
    room.lose_ended_threads()
    error = _error_of(room, 0, meeting)
    assert isinstance(error, PeerLost)
    assert error.peer == 1


def test_message_before_and_after_its_receive():
    room, early, late = _room(2), torch.zeros(1), torch.zeros(1)
    room.send(1, Message(0, 7, torch.ones(1)))
    room.post(1, Receive(early, 0, 7))
    receive = Receive(late, None, 7)
    room.post(1, receive)
    assert not receive.ended.is_set()
    room.send(1, Message(0, 7, torch.ones(1) * 2))
    assert (early.item(), late.item(), receive.source) == (1.0, 2.0, 0)


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
    assert receive.failure is not None
    assert receive.failure.kind is Desync


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
    assert wrong.ended.is_set()
    assert wrong.failure is not None
    assert wrong.failure.kind is Desync
    assert right.ended.is_set()
    assert right.failure is None
    assert got.tolist() == [1, 1, 1]
