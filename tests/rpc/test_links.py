"""Messages are delivered in the order in which they were sent."""

from __future__ import annotations

from random import Random

from dure.rpc.links import OrderedLink


def test_messages_in_any_order_are_delivered_in_that_in_which_they_were_sent() -> None:
    for seed in range(20):
        sender, receiver = OrderedLink(), OrderedLink()
        sent = [b"%d" % number for number in range(10)]
        under_way = [sender.send(body) for body in sent]
        Random(seed).shuffle(under_way)
        delivered = [receiver.receive(message) for message in under_way]
        assert [body for bodies in delivered for body in bodies] == sent
