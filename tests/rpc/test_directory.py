"""Reports are delivered in the order in which they were sent."""

from __future__ import annotations

from random import Random

from dure.rpc.directory import Directory
from dure.rpc.names import WorkerInfo
from dure.rpc.timers import Timers


def directory() -> Directory:
    timers = Timers()
    timers.close()
    made = Directory(timers, lambda _: None, lambda _: None)
    made.add(WorkerInfo("other", 1))
    return made


def test_reports_in_any_order_are_delivered_in_that_in_which_they_were_sent() -> None:
    for seed in range(20):
        sender, receiver = directory(), directory()
        sent = [b"%d" % number for number in range(10)]
        for body in sent:
            sender.queue(1, body)
        under_way = [*sender.take(sender.reach(1))]
        Random(seed).shuffle(under_way)
        delivered = [receiver.receive(1, [message]) for message in under_way]
        assert [body for bodies in delivered for body in bodies] == sent
