"""Who a process is."""

import msgspec

from dure.store.identity import alive, myself

from .conftest import dead_process


def test_a_process_is_known_by_more_than_its_number() -> None:
    me = myself()
    assert alive(me) is True
    assert alive(msgspec.structs.replace(me, start="1")) is False
    assert alive(msgspec.structs.replace(me, host_id="elsewhere")) is None
    assert alive(dead_process()) is False
