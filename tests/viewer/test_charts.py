"""Curves of a page."""

from pathlib import Path

from dure.trace.merging import read
from dure.viewer.charts import Charts
from dure.viewer.sources import Live
from dure.viewer.view import Feed, RankRow
from tests.trace.made_up import write
from tests.viewer.made_steps import marks, phases


def test_curves_count_each_mark_once_and_divide_by_steps(tmp_path: Path) -> None:
    charts = Charts()
    write(tmp_path, 0, [], {"marks": marks((0, 0, {"loss": 2.0}), (1, 30, {"loss": None}))})
    charts.take(read(tmp_path))
    more = marks((1, 30, {"loss": None}), (3, 70, {"loss": 1.0}))
    write(tmp_path, 0, [], {"marks": more})
    charts.take(read(tmp_path))
    assert charts.curves["step", "", 0].ys == [30.0, 20.0]  # 40 ms for two steps
    loss = charts.curves["scalar", "loss", 0]
    assert (loss.xs, loss.ys) == ([0, 1, 3], [2.0, None, 1.0])


def test_parts_are_means_over_ranks_and_have_a_rest(tmp_path: Path) -> None:
    charts = Charts(slot_s=1.0)
    write(tmp_path, 0, [], {"spans": phases(0, 4)})
    write(tmp_path, 1, [], {"spans": phases(1, 4, (8, 8))})
    charts.take(read(tmp_path))
    charts.finish()
    parts = {name: curve.ys for (kind, name, _), curve in charts.curves.items() if kind == "part"}
    assert parts == {"forward": [7.0], "backward": [6.0], "other": [7.0]}
    assert charts.curves["step", "", 0].ys == [20.0, 20.0, 20.0]


def test_progress_alone_gives_step_times(tmp_path: Path) -> None:
    page = Live("train.py", tmp_path)
    for at_s, step, pid in ((1.0, 10, 7), (2.0, 10, 7), (3.0, 14, 7), (4.0, 2, 8), (5.0, 4, 8)):
        page.feed(Feed(elapsed_s=at_s, ranks=[RankRow(rank=0, pid=pid, step=step)]))
    curve = page.charts.curves["step", "", 0]
    assert (curve.xs, curve.ys) == ([3.0, 5.0], [500.0, 500.0])  # 2 s for 4 steps, 1 s for 2
