"""Where transfers stand in what ranks execute."""

from dure.schedules import lower, make_schedule


def test_places_of_transfers_and_of_actions_on_stages():
    grid = make_schedule("1f1b", stages=3, microbatches=2, ranks=3)
    text = [" ".join(map(str, actions)) for actions in lower(grid, sharded={0, 2}).ranks]
    assert text == [
        "0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD 0RESHARD",
        "1RECV_F0 1RECV_F1 1F0 1SEND_F0 1F1 1SEND_F1 1RECV_B0 1B0 1SEND_B0 1RECV_B1 "
        "1B1 1SEND_B1 1REDUCE_GRAD",
        "2UNSHARD 2RECV_F0 2RECV_F1 2F0 2B0 2SEND_B0 2F1 2B1 2SEND_B1 2REDUCE_GRAD 2RESHARD",
    ]
    deferred = lower(grid, defer_receives=True).actions(1)
    assert " ".join(map(str, deferred)).startswith("1RECV_F0 1F0 1RECV_F1 1SEND_F0 1F1 1SEND_F1")
