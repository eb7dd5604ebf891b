"""Layouts: divisions of a job over ranks, and their columns for the cost model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

import numpy as np

from dure.errors import UsageError
from dure.plan.cost import Column, Jobs, choose, least, most
from dure.plan.jobs import Job
from dure.plan.machines import Machine

__all__ = ["RECOMPUTED", "STRATEGIES", "Layout", "columns", "layouts"]

_OP = "plan layouts"

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
"""Sharded along dp: nothing; the optimizer's state; also gradients (FSDP that keeps
unsharded parameters between forward and backward); also parameters; parameters within a node."""

RECOMPUTED = ("none", "selective", "full")

_OTHER_AXES = {"tp": "tp", "cp": "cp", "pp": "pp", "interleaved": "parts", "mb": "microbatch"}
_AXES = dict.fromkeys(("dp", *STRATEGIES), "dp") | _OTHER_AXES
_MOST_PARTS = 2
_LARGEST_MICROBATCH = 32


@dataclass(frozen=True, order=True)
class Layout:
    """A division of a job over ranks.

    Ranks along tp are nearest to each other, then those along cp, dp and pp.

    Attributes:
        dp: Ranks of data parallelism.
        strategy: "ddp", "zero1", "zero2", "fsdp" or "hsdp" (see `STRATEGIES`).
        tp: Ranks of tensor parallelism, with sequence parallelism.
        cp: Ranks of context parallelism.
        pp: Ranks of the pipeline.
        parts: Stages per rank of the pipeline.
        microbatch: Sequences of a microbatch.
        microbatches: Microbatches of a step.
        recompute: Recomputed activations: "none", "selective" or "full".

    Example:
        ```python
        from dure import plan

        layout = plan.Layout(dp=4, strategy="fsdp", tp=2)
        assert layout.ranks == 8
        ```
    """

    dp: int = 1
    strategy: str = "ddp"
    tp: int = 1
    cp: int = 1
    pp: int = 1
    parts: int = 1
    microbatch: int = 1
    microbatches: int = 1
    recompute: str = "none"

    def __str__(self) -> str:
        axes = [f"{self.strategy}={self.dp}"] if self.dp > 1 else []
        if self.dp == 1 and self.strategy != "ddp":
            axes = [self.strategy]  # the ranks along cp share
        axes += [f"{axis}={n}" for axis in ("tp", "cp", "pp") if (n := getattr(self, axis)) > 1]
        if self.parts > 1:
            axes.append(f"interleaved={self.parts}")
        axes.append(f"mb={self.microbatch}")
        if self.recompute != "none":
            axes.append(f"recompute={self.recompute}")
        return ",".join(axes)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def mesh(self) -> Layout:
        """The layout with default stages, microbatches and recomputation."""
        return replace(self, parts=1, microbatch=1, microbatches=1, recompute="none")

    @property
    def schedule(self) -> str:
        """Name of the pipeline's schedule."""
        return "1f1b" if self.parts == 1 else "interleaved-1f1b"

    @staticmethod
    def parse(text: str, job: Job) -> Layout:
        """Parse the text form, such as ``fsdp=8,tp=2,pp=4,interleaved=2,mb=1,recompute=full``.

        Args:
            text: The layout, as `str` returns it.
            job: The job, for the number of microbatches.

        Returns:
            The layout.

        Raises:
            UsageError: An unknown part, or a layout that does not divide the batch.
        """
        found = Layout()
        for word in filter(None, text.replace(" ", "").split(",")):
            name, _, value = word.partition("=")
            axis, number = _AXES.get(name), value or "1"
            if name == "recompute" and value in RECOMPUTED:
                found = replace(found, recompute=value)
            elif axis is not None and number.isdecimal() and int(number):
                strategy = name if name in STRATEGIES else found.strategy
                found = replace(found, strategy=strategy, **{axis: int(number)})
            else:
                raise UsageError(
                    "a layout has no such part",
                    op=_OP,
                    seen=repr(word),
                    fix=f"Write it as the table does: {', '.join(_AXES)} with a "
                    f"number, recompute with one of {', '.join(RECOMPUTED)}.",
                )
        each = found.dp * found.microbatch
        if job.sequences % each:
            raise UsageError(
                "the batch is not divided by dp times the microbatch",
                op=_OP,
                seen=f"{job.sequences} sequences, dp={found.dp}, mb={found.microbatch}",
                fix=f"Take dp * mb that divides {job.sequences}.",
            )
        return replace(found, microbatches=job.sequences // each)


def layouts(job: Job, machine: Machine) -> list[Layout]:
    """Return all layouts that divide a job over a machine, whether they fit or not.

    Raises:
        UsageError: No layout divides the job; the message names a batch or a number of ranks for
            which one does.
    """
    found = [
        layout
        for mesh in _meshes(job, machine)
        for layout in _filled(mesh, job)
        if not (layout.pp > 1 and layout.microbatches < layout.pp)
    ]
    if not found:
        usual = 1 << max(0, machine.ranks.bit_length() - 1)
        raise UsageError(
            f"nothing divides the job over {machine.ranks} ranks",
            op=_OP,
            seen=f"{job.sequences} sequences, {job.model.heads} heads, {job.model.groups} of keys, "
            f"{job.model.layers} layers",
            fix=f"Take a batch of a multiple of {machine.ranks} sequences "
            f"({machine.ranks * job.model.length:,} tokens), or {usual} ranks.",
        )
    return found


def _meshes(job: Job, machine: Machine) -> Iterator[Layout]:
    """Yield meshes with the strategies that they can have."""
    model, ranks = job.model, machine.ranks
    heads = gcd(model.heads, model.groups)
    for tp, cp in itertools.product(_divisors(ranks), repeat=2):
        if heads % tp or tp > machine.gpus_per_node or ranks % (tp * cp):
            continue
        if cp > 1 and (model.length % (2 * cp) or model.length // cp < 1024):
            continue
        for pp in _divisors(ranks // (tp * cp)):
            if pp > model.layers:
                continue
            dp = ranks // (tp * cp * pp)
            for strategy in _strategies(dp * cp, tp * cp, machine):
                yield Layout(dp=dp, strategy=strategy, tp=tp, cp=cp, pp=pp)


def _strategies(replicas: int, before: int, machine: Machine) -> Sequence[str]:
    if replicas == 1:
        return ("ddp",)
    near = machine.gpus_per_node // before
    hybrid = near > 1 and replicas > near and replicas % near == 0
    return STRATEGIES if hybrid else STRATEGIES[:-1]


def _filled(mesh: Layout, job: Job) -> Iterator[Layout]:
    """Yield a mesh with every microbatch, schedule and recomputation that it can have."""
    if job.sequences % mesh.dp:
        return
    each = job.sequences // mesh.dp
    for size in _divisors(each):
        if size > _LARGEST_MICROBATCH:
            break
        sized = replace(mesh, microbatch=size, microbatches=each // size)
        for parts in range(1, _MOST_PARTS + 1):
            interleaves = mesh.pp > 1 and mesh.pp * parts <= job.model.layers
            if parts == 1 or (interleaves and sized.microbatches % mesh.pp == 0):
                for recompute in RECOMPUTED:
                    yield replace(sized, parts=parts, recompute=recompute)


def _divisors(number: int) -> list[int]:
    return [i for i in range(1, number + 1) if number % i == 0]


def columns(job: Job, machine: Machine, chosen: Sequence[Layout]) -> Jobs:
    """Return the numbers of a job and the columns of its layouts, for `step_time`, `peak_memory`.

    Raises:
        UsageError: The GPU does not support that precision.
    """
    model, gpu = job.model, machine.gpu
    if job.precision == "fp8" and not gpu.fp8_tflops:
        raise UsageError(f"{gpu.name} has no products in 8 bits", op=_OP, fix="Take bf16.")
    is_cpu, single = gpu.kind == "cpu", job.precision == "fp32"
    names = ("dp", "tp", "cp", "pp", "parts", "microbatch", "microbatches")
    of = {name: _column([getattr(layout, name) for layout in chosen]) for name in names}
    strategy = _column([STRATEGIES.index(layout.strategy) for layout in chosen])
    near = most(machine.gpus_per_node // (of["tp"] * of["cp"]), 1) * of["cp"]
    replicas = of["dp"] * of["cp"]
    sharing = choose(strategy == STRATEGIES.index("hsdp"), least(near, replicas), replicas)
    recompute = _column([RECOMPUTED.index(layout.recompute) for layout in chosen])
    peak = gpu.fp8_tflops if job.precision == "fp8" else gpu.bf16_tflops
    same = {
        "layers": model.layers,
        "width": model.width,
        "hidden": model.hidden,
        "kv_width": model.keys,
        "heads": model.heads,
        "vocab": model.vocabulary,
        "seq": model.length,
        "gated": model.gated,
        "tied": model.tied,
        "peak": peak * 1e12 * (0.5 if single and not is_cpu else 1.0),
        "hbm": gpu.memory_tb_s * 1e12,
        "link": gpu.link_gb_s * 1e9,
        "net": gpu.network_gb_s * 1e9,
        "node_size": machine.gpus_per_node,
        "is_h100": gpu.kind in ("h100", "b200"),
        "efa": gpu.network == "efa",
        "power": gpu.power,
        "param_bytes": 4 if single else 2,
        "master_bytes": 0 if single else 4,
        "grad_bytes": 4,
        "fp8": job.precision == "fp8",
        "fused": 1,
        "newest": 0,
        "compiled": job.compiled,
        "overlapped": 0,
        "balanced": 1,
        "regathers": 0,
        "split": 1,
        "bucketed": 1,
        "shared": is_cpu and machine.nodes == 1,
    }
    return Jobs(
        same
        | of
        | {
            "zero": least(strategy, 3.0),
            "shard": choose(strategy >= 2, sharing, 1.0),
            "sp": of["tp"] > 1,
            "once": of["pp"] > 1,  # a schedule's backward passes only add
            "recompute": recompute == 2,
            "selective": recompute == 1,
        }
    )


def _column(values: Sequence[int]) -> Column:
    """Return an array; for a single layout a plain number, with which computing is much faster."""
    return np.array(values, dtype=float) if len(values) > 1 else float(values[0])
