"""The text form of actions, and the placement of stages."""

import pytest

from dure.errors import UsageError
from dure.schedules import Action, Kind, loop_placement, v_placement


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("12F3", Action(12, Kind.FORWARD, 3)),
        ("1B0", Action(1, Kind.FULL_BACKWARD, 0)),
        ("1I2", Action(1, Kind.BACKWARD_INPUT, 2)),
        ("1W2", Action(1, Kind.BACKWARD_WEIGHT, 2)),
        ("0SEND_F10", Action(0, Kind.SEND_F, 10)),
        ("1RECV_B0", Action(1, Kind.RECV_B, 0)),
        ("0UNSHARD", Action(0, Kind.UNSHARD)),
        ("0RESHARD", Action(0, Kind.RESHARD)),
        ("0REDUCE_GRAD", Action(0, Kind.REDUCE_GRAD)),
        (
            "(0F1;1B0)OVERLAP_F_B",
            Action(
                -1,
                Kind.OVERLAP_F_B,
                None,
                (Action(0, Kind.FORWARD, 1), Action(1, Kind.FULL_BACKWARD, 0)),
            ),
        ),
    ],
)
def test_text_and_back(text, action):
    assert str(action) == text
    assert Action.parse(f" {text} ") == action


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F1",
        "0F",
        "0X1",
        "0F1x",
        "0UNSHARD1",
        "-1F0",
        "0F-1",
        "0OVERLAP_F_B",
        "(0F1)OVERLAP_F_B",
        "(0F1;0SEND_F0)OVERLAP_F_B",
    ],
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(UsageError) as error:
        Action.parse(text)
    assert repr(text) in error.value.seen
    assert "2F0" in error.value.fix


def test_other_ends():
    for send, receive in [("0SEND_F3", "1RECV_F3"), ("2SEND_B0", "1RECV_B0")]:
        assert Action.parse(send).other_end == Action.parse(receive)
        assert Action.parse(receive).other_end == Action.parse(send)


def test_placements():
    assert loop_placement(6, 3) == (0, 1, 2, 0, 1, 2)
    assert v_placement(9, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    with pytest.raises(UsageError) as error:
        v_placement(7, 3)
    assert "6 stages" in error.value.fix
