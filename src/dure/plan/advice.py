"""What to write and to run for a layout: the lines of Dure code, and the command."""

from __future__ import annotations

from dure.plan.jobs import Job
from dure.plan.layouts import Layout
from dure.plan.machines import Machine

__all__ = ["code", "command"]


def command(machine: Machine, program: str = "train.py") -> str:
    """Return the command that starts a job on each node of a machine."""
    if machine.nodes == 1:
        return f"dure run --nproc {machine.gpus_per_node} {program}"
    return (
        f"dure run --nnodes {machine.nodes} --nproc-per-node {machine.gpus_per_node} "
        f"--rdzv-endpoint HOST:29400 {program}"
    )


def code(layout: Layout, job: Job, machine: Machine) -> str:
    """Return the lines that a training program needs for a layout (docs/n_dimensions.md).

    `model` is the module, or with a pipeline the rank's stage of it; `model.layers` its layers.
    """
    lines = _mesh(layout, machine)
    lines += _tensor_parallel(layout)
    lines += _recompute(layout)
    lines += _data_parallel(layout, job)
    lines += _pipeline(layout, machine)
    if layout.cp > 1:
        lines += ['with context_parallel(mesh["cp"]):', "    ...  # forward, backward"]
    return "\n".join(lines)


def _device(machine: Machine) -> str:
    return "cpu" if machine.gpu.kind == "cpu" else "cuda"


def _mesh(layout: Layout, machine: Machine) -> list[str]:
    near = machine.gpus_per_node // (layout.tp * layout.cp)
    axes = {"pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp}
    if layout.strategy == "hsdp":
        axes = {"pp": layout.pp, "dp": layout.dp // near, "fsdp": near, "cp": layout.cp}
        axes["tp"] = layout.tp
    elif layout.strategy in ("fsdp", "zero2"):
        axes = {"pp": layout.pp, "fsdp": layout.dp, "cp": layout.cp, "tp": layout.tp}
    kept = ("dp",) if layout.strategy in ("ddp", "zero1") else ("fsdp",)
    axes = {name: n for name, n in axes.items() if n > 1 or (name in kept and layout.cp > 1)}
    axes = axes or {"dp": 1}
    sizes, names = tuple(axes.values()), tuple(axes)
    lines = [f'mesh = init_device_mesh("{_device(machine)}", {sizes}, mesh_dim_names={names})']
    if layout.cp > 1 and "fsdp" in axes:
        lines.append('mesh["fsdp", "cp"]._flatten("shard")  # cp shares parameters as well')
    return lines


def _tensor_parallel(layout: Layout) -> list[str]:
    if layout.tp == 1:
        return []
    return ['parallelize_module(model, mesh["tp"], plan)  # with SequenceParallel norms']


def _recompute(layout: Layout) -> list[str]:
    if layout.recompute == "none":
        return []
    options = "use_reentrant=False"
    if layout.recompute == "selective":  # torch.utils.checkpoint: which products to keep
        options += ", context_fn=partial(create_selective_checkpoint_contexts, policy)"
    return [
        "for layer in model.layers:",
        f"    layer.forward = partial(checkpoint, layer.forward, {options})",
    ]


def _data_parallel(layout: Layout, job: Job) -> list[str]:
    adamw = "optimizer = torch.optim.AdamW(model.parameters())"
    if layout.dp * layout.cp == 1:
        return [adamw]
    group = 'mesh.get_group("dp")' if layout.cp == 1 else 'mesh["dp", "cp"]._flatten().get_group()'
    if layout.strategy in ("ddp", "zero1"):
        zero = "ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, "
        return [
            f"group = {group}",
            "model = DistributedDataParallel(model, process_group=group)",
            adamw if layout.strategy == "ddp" else f"optimizer = {zero}process_group=group)",
        ]
    axis = '"shard"' if layout.cp > 1 else '"fsdp"'
    axis = f'"dp", {axis}' if layout.strategy == "hsdp" else axis
    options = [f"mesh=mesh[{axis}]"]
    if job.precision != "fp32":
        options.append("mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)")
    if layout.strategy == "zero2":
        options.append("reshard_after_forward=False")
    return [
        f"options = dict({', '.join(options)})",
        "for layer in model.layers:",
        "    fully_shard(layer, **options)",
        "fully_shard(model, **options)",
        adamw,
    ]


def _pipeline(layout: Layout, machine: Machine) -> list[str]:
    if layout.pp == 1:
        return []
    name = "Schedule1F1B" if layout.parts == 1 else "ScheduleInterleaved1F1B"
    of = "stage" if layout.parts == 1 else "stages"
    stages = layout.pp * layout.parts
    return [
        f'stage = PipelineStage(model, rank, {stages}, "{_device(machine)}", '
        'group=mesh.get_group("pp"))'
        + (f"  # {layout.parts} of them a rank: stages" if layout.parts > 1 else ""),
        f"schedule = {name}({of}, {layout.microbatches}, loss_fn)",
    ]
