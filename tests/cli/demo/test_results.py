"""The demo's table and its report, from runs that are made up."""

from dure.cli.demo.results import Run, comparison, report


def finished_run(ranks: int, step_s: float, communication_s: float = 0.0) -> Run:
    """Return a run of 20 steps whose loss halves every step, from 8."""
    run = Run(ranks=ranks, batch_size=4)
    compute_s = step_s - communication_s
    phases = [0.0, compute_s / 4, compute_s / 2, communication_s, compute_s / 4, 0.0]
    for step in range(1, 21):
        run.add({"loss": 16 * 0.5**step, "phases": phases})
    run.add({"accuracy": 0.5})
    run.add({"accuracy": 0.9})
    return run


def test_comparison_shows_what_the_last_run_gains() -> None:
    heads, *rows = comparison([finished_run(1, 1.0), finished_run(2, 0.5, 0.125)])
    assert heads == ["", "1 rank", "2 ranks", "gain"]
    assert rows == [
        ["images/s", "4", "8", "2.00×"],
        ["step time", "1000.0 ms", "500.0 ms", "2.00×"],
        ["· data wait", "0.00 ms, 0%", "0.00 ms, 0%", ""],
        ["· forward", "250.00 ms, 25%", "93.75 ms, 19%", ""],
        ["· backward", "500.00 ms, 50%", "187.50 ms, 38%", ""],
        ["· exposed communication", "0.00 ms, 0%", "125.00 ms, 25%", ""],
        ["· optimizer", "250.00 ms, 25%", "93.75 ms, 19%", ""],
        ["· other", "0.00 ms, 0%", "0.00 ms, 0%", ""],
        ["training loss", "0.00284", "0.00284", ""],
        ["test accuracy", "90.0%", "90.0%", ""],
    ]


def test_report_is_self_contained_and_complete() -> None:
    one, two = finished_run(1, 1.0), finished_run(2, 0.5, 0.125)
    one.add({"facts": {"Images": "stripes & dots"}})
    text = report([one, two], "dure demo --out 'a <b>'")
    assert "the mean of the last 11 steps" in text  # without colors for numbers
    assert text.count("<polyline") == 2
    for outside in ("src=", "href", "url(", "<script", "<link", "<img", "<b>"):
        assert outside not in text
    for wanted in ("a &lt;b&gt;", "stripes &amp; dots", "Kernel", "2.00×", "gain", "2 ranks"):
        assert wanted in text
