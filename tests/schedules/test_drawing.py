"""Pictures of schedules."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from dure.schedules import SCHEDULES, draw_svg, draw_text, make_schedule, simulate

ROOT = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists())


def test_text_shows_idle_ranks():
    drawn = draw_text(simulate(make_schedule("1f1b", stages=2, microbatches=2, ranks=2)))
    assert drawn.splitlines() == [
        "rank 0   F0 F1 ····· B0    ·· B1",
        "rank 1   ·· F0 B0    F1 B1    ······",
    ]
    assert simulate(make_schedule("1f1b", stages=2, microbatches=2, ranks=2)).bubbles == (
        1 - 6 / 9,
        1 - 6 / 9,
    )


@pytest.mark.parametrize("generator", SCHEDULES, ids=lambda g: g.name)
def test_pictures_of_the_documentation_are_current(generator):
    stages = 4 * (generator.stages_a_rank or 2)
    schedule = make_schedule(generator.name, stages=stages, microbatches=8, ranks=4)
    drawn = draw_svg(simulate(schedule))
    path = ROOT / "docs" / "pictures" / f"{generator.name}.svg"
    assert path.read_text() == drawn, "run `make pictures`"
    boxes = [
        t.text for t in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}title")
    ]
    assert len(boxes) == sum(len(a.parts) for rank in schedule.ranks for a in rank if a)
