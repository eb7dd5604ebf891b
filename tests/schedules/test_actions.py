"""Actions, and where stages lie."""

import pytest

from dure.errors import UsageError
from dure.schedules import Action, Kind, loop_placement, v_placement


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("12F3", Kind.FORWARD),
        ("12B3", Kind.FULL_BACKWARD),
        ("12I3", Kind.BACKWARD_INPUT),
        ("12W3", Kind.BACKWARD_WEIGHT),
        ("12SEND_F3", Kind.SEND_F),
        ("12RECV_B3", Kind.RECV_B),
        ("12UNSHARD", Kind.UNSHARD),
        ("12RESHARD", Kind.RESHARD),
        ("12REDUCE_GRAD", Kind.REDUCE_GRAD),
    ],
)
def test_text_and_back(text, kind):
    action = Action(12, kind, 3) if "3" in text else Action(12, kind)
    assert str(action) == text
    assert Action.parse(f" {text} ") == action
    both = Action(-1, Kind.OVERLAP_F_B, None, (Action.parse("0F1"), Action.parse("1B0")))
    assert Action.parse("(0F1;1B0)OVERLAP_F_B") == both


@pytest.mark.parametrize(
    "text",
    [
        *("", "F1", "0F", "0X1", "0UNSHARD1", "-1F0"),
        *("0OVERLAP_F_B", "(0F1)OVERLAP_F_B", "(0F1;0SEND_F0)OVERLAP_F_B"),
    ],
)
def test_what_is_no_action_is_refused(text):
    with pytest.raises(UsageError) as error:
        Action.parse(text)
    assert repr(text) in error.value.seen
    assert "2F0" in error.value.fix


def test_placements():
    assert loop_placement(6, 3) == (0, 1, 2, 0, 1, 2)
    assert v_placement(9, 3) == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    with pytest.raises(UsageError) as error:
        v_placement(7, 3)
    assert "6 stages" in error.value.fix
