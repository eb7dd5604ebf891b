"""What the leader knows of the others, from beats in a store."""

from __future__ import annotations

import itertools
import socket

from dure.launch.agent.events import Joined, Lost
from dure.launch.agent.watch import Heartbeat, Watch, beat_key
from dure.store import HashStore
from dure.store.key import mint


def test_who_takes_over_knows_its_part_when_each_was_heard_or_given_up() -> None:
    heart = Heartbeat(beat_s=0.0, lost_s=0.2, knock_s=0.05)
    watch, store = Watch(mint(), heart), HashStore()
    with socket.socket() as nobody:  # bound, but it does not listen: no standby can be reached
        nobody.bind(("127.0.0.1", 0))
        home = f"127.0.0.1:{nobody.getsockname()[1]}"
        watch.note(Joined("talks", "b", 1, None, home), "me")
        watch.note(Joined("mute", "c", 1, None, home), "me")
        lost: list[Lost] = []
        for beat in itertools.count():
            store.set(beat_key("talks"), str(beat))
            assert not watch.sure
            lost = watch.lost(store)
            if lost:
                break
    assert [(event.agent, event.silent) for event in lost] == [("mute", True)]
    assert watch.sure
    watch.begin()
    assert not watch.sure
    watch.close()
