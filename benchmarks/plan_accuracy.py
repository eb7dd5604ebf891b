"""How well `dure plan` predicts published measurements, and the fit of its constants to them.

    python benchmarks/plan_accuracy.py FOLDER                  the fitted constants, own rows
    python benchmarks/plan_accuracy.py FOLDER --leave-out      fitted without what is under test
    python benchmarks/plan_accuracy.py FOLDER --fit            fit, and write data/constants.toml
    python benchmarks/plan_accuracy.py FOLDER --worst SOURCE   a source's rows, worst first

FOLDER has the published measurements (CSV files whose heads say what columns mean). Fitting leaves
out, in turn, each model (of hf_ultrascale: each group of model and nodes). Rows that do not state
their microbatch are printed apart and are not fitted; so are 4-bit formats, MoE, and fine-tuning.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dure.plan.constants import Constants, described, document
from dure.plan.cost import Jobs, step_time
from dure.plan.machines import Gpu, gpus
from dure.plan.peak import peak_memory

FILES = (
    "hf_ultrascale_h100_sweep",
    "hf_ultrascale_tp_scaling",
    "llm_foundry_mpt",
    "megatron_gpt",
    "torchtitan",
    "vtrain_megatron_a100_multinode",
    "vtrain_megatron_a100_singlenode",
    "nemo_performance",
)
HARDWARE = {
    "V100": "v100",
    "A100": "a100",
    "H100-9": "h100-96gb",
    "H100": "h100",
    "H200": "h200",
    "B200": "b200",
}

# What the sources state, or their heads, about software (by the first letters of the source).
FUSED = ("hf", "torchtitan", "llm", "nemo", "megatron_h100")  # attention in one kernel
NEWEST = ("nemo", "megatron_h100")  # the vendor's kernels, and communication overlapped
WITH_FLOAT32_GRADIENTS = ("hf", "torchtitan", "nemo")
BALANCED = ("hf", "torchtitan")  # stages cut by cost
BUCKETED = ("hf", "torchtitan")  # gradients reduced during the backward pass
SPLIT_MESSAGES = ("hf", "torchtitan", "nemo", "meg", "mt_")

GROUPS = {  # how rows are named in the tables
    "megatron_sc21": "megatron",
    "megatron_2021_single": "megatron",
    "megatron_2021_multi": "megatron",
    "megatron_actrecompute": "megatron",
    "mt_nlg": "megatron",
}
WEIGHTS = {  # of a source as a whole in the fit
    "hf_ultrascale": 300,
    "hf_ultrascale_tp_fig": 2,
    "llm_foundry": 800,
    "megatron": 250,
    "torchtitan": 60,
    "torchtitan, 8 bits": 10,
    "vtrain_multi": 500,
    "vtrain_single": 2500,
    "nemo": 6,
}
MEMORY_WEIGHTS = {"torchtitan": 8.0, "torchtitan, 8 bits": 8.0}  # of each row; others 0.25
SLOW_ROW_WEIGHT = 0.01  # of each row that is far behind its group's best
ROBUST = 0.12  # errors (of the logarithm) from which a row pulls less
READ_OFF = ("room",)  # too few rows decide it: read off, not fitted
PRIOR = 0.25  # of a constant's logarithm, towards its value before


@dataclass(frozen=True)
class Row:
    """A measurement: a job, and what was measured."""

    source: str
    label: str
    model: str
    nodes: int
    job: dict[str, float]
    seconds: float  # of a step; nan: none
    memory: float  # bytes; nan: none
    memory_size: float  # bytes of a GPU
    failed: bool
    speed: float  # tokens/s of a GPU
    counted: bool = True

    @property
    def group(self) -> str:
        """What is left out together."""
        return f"{self.model} on {self.nodes}" if self.source == "hf_ultrascale" else self.model


def read(folder: Path) -> list[Row]:
    """Return the rows that can be predicted."""
    known = gpus()
    rows: list[Row] = []
    for name in FILES:
        path = folder / f"{name}.csv"
        if not path.exists():
            print(f"{path} is not there", file=sys.stderr)
            continue
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        for line in csv.DictReader(lines):
            row = _row(line, known)
            if row is not None:
                rows.append(row)
    best: dict[str, float] = defaultdict(float)
    for row in rows:
        best[row.group] = max(best[row.group], row.speed)
    return [
        replace(row, counted=row.source != "hf_ultrascale" or 3 * row.speed >= best[row.group])
        for row in rows
    ]


def _row(line: dict[str, str], known: dict[str, Gpu]) -> Row | None:
    source, precision, notes = line["source_id"], line["precision"], line["notes"]
    gpu = next((known[to] for at, to in HARDWARE.items() if line["hardware"].startswith(at)), None)
    failed = line["status"] in ("failed", "oom")
    if gpu is None or not (line["step_time_s"] or failed) or line["ep"] not in ("", "1"):
        return None
    if re.search("fp4|MX", precision, re.IGNORECASE) or "lora" in notes:
        return None
    if source.startswith("nemo") and not precision:
        return None
    stated = line["mbs"] != ""
    recompute = line["recompute"]
    eight_bits = bool(re.search("fp8|float8", precision, re.IGNORECASE))
    job = _sizes(line) | _hardware(source, gpu, eight_bits) | _software(line, eight_bits)
    name = "nemo" if source.startswith("nemo") else GROUPS.get(source, source)
    if name == "torchtitan" and eight_bits:
        name = "torchtitan, 8 bits"
    if not stated or (name.startswith("torchtitan") and not recompute):
        name += ", not all stated"
    return Row(
        source=name,
        label=f"{source} {line['row']}",
        model=line["model"],
        nodes=int(_number(line, "nodes", 0)),
        job={key: float(value) for key, value in job.items()},
        seconds=_number(line, "step_time_s", np.nan),
        memory=_number(line, "mem_gib", np.nan) * 2**30,
        memory_size=gpu.memory_gb * 1e9,
        failed=failed,
        speed=_number(line, "tok_s_gpu", 0),
    )


def _sizes(line: dict[str, str]) -> dict[str, float]:
    """Return a row's model and layout."""
    is_hf = line["source_id"].startswith("hf")
    width, heads, zero = (
        _number(line, "hidden"),
        _number(line, "heads"),
        _number(line, "zero_stage", 0),
    )
    dp, cp = _number(line, "dp", 1), _number(line, "cp", 1)
    tied = not line["source_id"].startswith(("torchtitan", "nemo"))
    return {
        "layers": _number(line, "layers"),
        "width": width,
        "hidden": _number(line, "ffn"),
        "kv_width": width / heads * _number(line, "kv_heads"),
        "heads": heads,
        "vocab": _number(line, "vocab", 51_200),
        "seq": _number(line, "seq_len"),
        "gated": "llama" in line["model"],
        "tied": tied and not (is_hf and _number(line, "n_params_b") > 4),
        "dp": dp,
        "tp": _number(line, "tp", 1),
        "cp": cp,
        "pp": _number(line, "pp", 1),
        "zero": zero,
        "shard": dp * cp if zero >= 2 else 1,
        "parts": _number(line, "vpp", 1),
        "microbatch": _number(line, "mbs", 1),
        "microbatches": _number(line, "gas") if line["mbs"] else _number(line, "gbs") / dp,
    }


def _hardware(source: str, gpu: Gpu, eight_bits: bool) -> dict[str, float]:
    network = {"vtrain_multi": 12.5e9, "llm_foundry": 25e9 if gpu.kind == "a100" else 50e9}
    return {
        "peak": (gpu.fp8_tflops if eight_bits else gpu.bf16_tflops) * 1e12,
        "hbm": gpu.memory_tb_s * 1e12,
        "link": gpu.link_gb_s * 1e9,
        "net": network.get(source, gpu.network_gb_s * 1e9),
        "node_size": 8,
        "is_h100": gpu.kind in ("h100", "b200"),
        "efa": source.startswith("hf"),
        "power": gpu.power,
    }


def _software(line: dict[str, str], eight_bits: bool) -> dict[str, float]:
    """Return what a row, or the head of its file, states about software."""
    source, precision, recompute = line["source_id"], line["precision"], line["recompute"]
    newest = source.startswith(NEWEST)
    float32 = source.startswith(WITH_FLOAT32_GRADIENTS) or "DEFAULT" in precision
    sequence = source.startswith((*BALANCED, *NEWEST, "nemo")) or "sequence" in recompute
    return {
        "sp": _number(line, "tp", 1) > 1 and sequence and "without" not in line["notes"],
        "recompute": {"full": 1.0, "selective layer": 0.5}.get(recompute, 0.0),
        "selective": "selective" in recompute and recompute != "selective layer",
        "param_bytes": 2,
        "master_bytes": 0 if "PURE" in precision else 4,
        "grad_bytes": 4 if float32 or precision == "bf16" else 2,
        "fp8": eight_bits,
        "fused": source.startswith(FUSED),
        "newest": newest,
        "compiled": line["compile"] == "yes" or newest,
        "overlapped": newest or "async TP" in line["notes"],
        "balanced": source.startswith(BALANCED),
        "regathers": source.startswith("hf") and _number(line, "pp", 1) > 1,
        "split": source.startswith(SPLIT_MESSAGES),
        "bucketed": source.startswith(BUCKETED),
        "once": 0,
        "shared": 0,
    }


def _number(line: dict[str, str], name: str, otherwise: float | None = None) -> float:
    try:
        return float(line[name])
    except ValueError:
        if otherwise is None:
            raise
        return otherwise


class Fit:
    """Fits constants to rows: a robust least squares of the logarithm of step time and memory."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = [r for r in rows if r.source in WEIGHTS and not r.failed]
        self.jobs = Jobs.of([row.job for row in self.rows])
        self.log_seconds = np.log([row.seconds for row in self.rows])
        self.log_memory = np.log([row.memory for row in self.rows])
        many: dict[str, int] = defaultdict(int)
        for row in self.rows:
            many[row.source] += row.counted
        self.weights = np.sqrt(
            [
                (WEIGHTS[row.source] / many[row.source]) if row.counted else SLOW_ROW_WEIGHT
                for row in self.rows
            ]
        )
        self.size_weights = np.sqrt([MEMORY_WEIGHTS.get(row.source, 0.25) for row in self.rows])
        self.start = np.log([constant.before for constant in described().values()])
        self.priors = np.array([100 if name in READ_OFF else PRIOR for name in described()])

    def constants(self, x: Any) -> Constants:
        """Return constants of their logarithms."""
        return Constants(dict(zip(described(), np.exp(x).tolist(), strict=True)))

    def residuals(self, x: Any, seen: Any) -> Any:
        """Return what least squares makes small."""
        seconds, sizes = predict(self.jobs, self.constants(x))
        times = np.nan_to_num(np.log(seconds) - self.log_seconds)
        memory = np.nan_to_num(sizes / np.exp(self.log_memory) - 1)
        return np.concatenate(
            [
                (_robust(times) * self.weights)[seen],
                (_robust(memory) * self.size_weights)[seen],
                self.priors * (x - self.start),
            ]
        )

    def run(self, start: Any, without: Callable[[Row], bool] = lambda _: False, n: int = 60) -> Any:
        """Return the logarithms of the constants, fitted without some rows."""
        from scipy.optimize import (  # pyright: ignore[reportMissingTypeStubs]
            least_squares,  # in the dev extra only
        )

        seen = np.array([not without(row) for row in self.rows])
        found = least_squares(
            self.residuals, start, args=(seen,), max_nfev=n, x_scale=0.3, method="trf"
        )
        return found.x


def predict(jobs: Jobs, c: Constants) -> tuple[Any, Any]:
    """Return seconds of a step and bytes of the fullest rank, of each job."""
    return sum(step_time(jobs, c).values()), sum(peak_memory(jobs, c).values())


def _robust(errors: Any) -> Any:
    scaled = errors / ROBUST
    return np.sign(scaled) * np.sqrt(2 * (np.sqrt(1 + scaled**2) - 1)) * ROBUST


def left_out(rows: list[Row], fit: Fit, x: Any) -> dict[int, tuple[float, float]]:
    """Return each row's step time and memory, predicted by a fit that has not seen its group."""
    found: dict[int, tuple[float, float]] = {}
    groups = sorted({(row.source == "hf_ultrascale", row.group) for row in rows})
    for of_hf, group in groups:
        under_test = [
            (i, row)
            for i, row in enumerate(rows)
            if row.group == group and (row.source == "hf_ultrascale") == of_hf
        ]

        def is_left_out(row: Row, group: str = group, of_hf: bool = of_hf) -> bool:
            return row.group == group and (row.source == "hf_ultrascale") == of_hf

        c = fit.constants(fit.run(x, is_left_out, n=6))
        jobs = Jobs.of([row.job for _, row in under_test])
        times, sizes = predict(jobs, c)
        for at, (i, _) in enumerate(under_test):
            found[i] = (float(times[at]), float(sizes[at]))
    return found


def report(rows: list[Row], predicted: dict[int, tuple[float, float]]) -> None:
    """Print the tables."""
    print(f"\n{'step time':<40} {'rows':>5} {'mean':>7} {'median':>7} {'bias':>7}")
    times = {i: predicted[i][0] / row.seconds for i, row in enumerate(rows) if row.seconds > 0}
    for source in sorted({row.source for row in rows}):
        own = [i for i in times if rows[i].source == source]
        _line(source, [times[i] for i in own if rows[i].counted])
        if not all(rows[i].counted for i in own):
            _line(f"{source}, all rows", [times[i] for i in own])
    print(f"\n{'memory':<40} {'rows':>5} {'mean':>7} {'median':>7} {'bias':>7}")
    sizes = {i: predicted[i][1] / row.memory for i, row in enumerate(rows) if row.memory > 0}
    for source in sorted({rows[i].source for i in sizes}):
        _line(source, [sizes[i] for i in sizes if rows[i].source == source])
    _failures(rows, predicted)
    room = Constants.load().room
    fitting = {i: t for i, t in times.items() if predicted[i][1] <= room * rows[i].memory_size}
    _picks(rows, fitting)
    singles = {
        (r.model, *(r.job[k] for k in ("dp", "tp", "pp", "microbatch")))
        for r in rows
        if r.source == "vtrain_single"
    }
    print(
        f"\nvtrain_single: {len(singles)} layouts; its times are exactly affine in the number of "
        "microbatches."
    )


def _line(name: str, ratios: list[float]) -> None:
    if ratios:
        errors = np.abs(np.array(ratios) - 1) * 100
        bias = 100 * float(np.mean(np.log(ratios)))
        print(
            f"{name:<40} {len(ratios):>5} {errors.mean():>6.1f}% {np.median(errors):>6.1f}% "
            f"{bias:>6.1f}%"
        )


def _failures(rows: list[Row], predicted: dict[int, tuple[float, float]]) -> None:
    """Print how many of the runs that failed would have been called too large."""
    room = Constants.load().room
    own = [i for i, row in enumerate(rows) if row.source == "hf_ultrascale"]
    called = {i for i in own if predicted[i][1] > room * rows[i].memory_size}
    failed = {i for i in own if rows[i].failed}
    right = len(called & failed)
    print(
        f"\nwhat fails: recall {right / max(1, len(failed)):.3f}, precision "
        f"{right / max(1, len(called)):.3f} ({len(failed)} of {len(own)} runs failed)"
    )


def _picks(rows: list[Row], times: dict[int, float]) -> None:
    """Print how well layouts that would be offered are ranked, by model, on up to 32 nodes."""
    print("\nhf_ultrascale, by predicted speed       rows  rank corr.  best of 3  first")
    best: dict[tuple[str, int], float] = defaultdict(float)
    for row in rows:
        if row.source == "hf_ultrascale":
            best[row.model, row.nodes] = max(best[row.model, row.nodes], row.speed)
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for i in times:
        if rows[i].source == "hf_ultrascale" and rows[i].nodes <= 32:
            groups[rows[i].model, rows[i].nodes].append(i)
    correlations: list[float] = []
    thirds: list[float] = []
    firsts: list[float] = []
    for (model, nodes), own in sorted(groups.items()):
        if len(own) < 5:
            continue
        speeds = np.array([rows[i].speed for i in own])
        order = np.argsort([times[i] / rows[i].speed for i in own])
        ranks = [
            np.argsort(np.argsort(a)) for a in (speeds, [rows[i].speed / times[i] for i in own])
        ]
        correlations.append(float(np.atleast_2d(np.corrcoef(np.array(ranks)))[0, 1]))
        thirds.append(float(speeds[order[:3]].max() / best[model, nodes]))
        firsts.append(float(speeds[order[0]] / best[model, nodes]))
        print(
            f"  {model} on {nodes} nodes".ljust(40) + f"{len(own):>4} {correlations[-1]:>11.2f} "
            f"{thirds[-1]:>10.2f} {firsts[-1]:>6.2f}"
        )
    if correlations:
        print(
            f"  mean rank correlation {np.mean(correlations):.3f}; best of the first three within "
            f"5 %: {sum(t >= 0.95 for t in thirds)} of {len(thirds)}; first within 10 %: "
            f"{sum(f >= 0.9 for f in firsts)} of {len(firsts)}"
        )


def worst(rows: list[Row], predicted: dict[int, tuple[float, float]], source: str) -> None:
    """Print a source's rows by the error of their step time, worst first."""
    own = [i for i, row in enumerate(rows) if row.source == source]
    own.sort(key=lambda i: -abs(np.log(predicted[i][0] / rows[i].seconds)) or 0)
    names = ("dp", "zero", "tp", "pp", "cp", "parts", "microbatch", "microbatches", "seq")
    for i in own:
        row = rows[i]
        layout = " ".join(f"{name}={row.job[name]:g}" for name in names)
        print(
            f"{row.label:<22} {row.model:<18} {row.nodes:>3} nodes {layout} {row.seconds:8.3f} s, "
            f"predicted {predicted[i][0] / row.seconds - 1:+.1%}; {row.memory / 2**30:.1f} GiB, "
            f"{predicted[i][1] / row.memory - 1:+.1%}"
        )


def speed(rows: list[Row]) -> None:
    """Print how many layouts a second the closed form predicts."""
    jobs, c = Jobs.of([row.job for row in rows] * 8), Constants.load()
    start = time.process_time()
    for _ in range(3):
        predict(jobs, c)
    together = (time.process_time() - start) / 3 / 8
    start = time.process_time()
    for row in rows:
        predict(Jobs(row.job), c)
    singly = time.process_time() - start
    print(
        f"\nclosed form, layouts/s on one core: {len(rows) / singly:,.0f} singly, "
        f"{len(rows) / together:,.0f} as columns"
    )


def fingerprint(rows: list[Row]) -> str:
    """Return a hash of the rows that are fitted."""
    text = repr([(sorted(row.job.items()), row.seconds, row.memory) for row in rows])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(path: Path, fit: Fit, x: Any, spread: tuple[float, float]) -> None:
    """Write fitted values into the file of constants, and where they come from."""
    c, text = fit.constants(x), path.read_text()
    for name in described():
        value = f"{getattr(c, name):.4g}"
        text = re.sub(rf"(\[constant\.{name}\]\nvalue = )\S+", rf"\g<1>{value}", text)
    for name, value in (
        ("rows", str(len(fit.rows))),
        ("hash", f'"{fingerprint(fit.rows)}"'),
        ("left_out_within", f"{spread[0]:.3f}"),
        ("left_out_across", f"{spread[1]:.3f}"),
    ):
        text = re.sub(rf"^{name} = \S+", f"{name} = {value}", text, flags=re.MULTILINE)
    path.write_text(text)


def spreads(rows: list[Row], predicted: dict[int, tuple[float, float]]) -> tuple[float, float]:
    """Return the errors that 8 of 10 counted rows stay within: on one node, on several."""
    errors = {
        i: abs(float(np.log(predicted[i][0] / row.seconds)))
        for i, row in enumerate(rows)
        if row.counted and row.seconds > 0 and row.source in WEIGHTS
    }
    one = [error for i, error in errors.items() if rows[i].nodes == 1]
    many = [error for i, error in errors.items() if rows[i].nodes > 1]
    return float(np.quantile(one, 0.8)), float(np.quantile(many, 0.8))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--fit", action="store_true", help="write the constants")
    parser.add_argument("--check", action="store_true", help="fit, and compare with the constants")
    parser.add_argument("--worst", metavar="SOURCE")
    args = parser.parse_args()
    rows = read(args.folder)
    constants = Constants.load()
    fit = Fit(rows)
    x = np.log([constant.value for constant in described().values()])
    if args.fit or args.check:
        x = fit.run(fit.start, n=200)
    jobs, c = Jobs.of([row.job for row in rows]), fit.constants(x)
    times, sizes = predict(jobs, c)
    predicted = {i: (float(times[i]), float(sizes[i])) for i in range(len(rows))}
    if args.check:
        moved = np.abs(times / predict(jobs, constants)[0] - 1).max()
        same = document("constants")["fit"]["hash"] == fingerprint(fit.rows)
        print(
            f"rows {'as fitted' if same else 'differ'}; no step time moves by more than {moved:.2%}"
        )
        sys.exit(0 if same and moved <= 0.01 else 1)
    if args.leave_out or args.fit:
        predicted = left_out(rows, fit, x)
    if args.fit:
        here = Path(__file__).resolve().parent.parent / "src/dure/plan/data/constants.toml"
        write(here, fit, x, spreads(rows, predicted))
    if args.worst:
        worst(rows, predicted, args.worst)
        return
    report(rows, predicted)
    speed(rows)


if __name__ == "__main__":
    main()
