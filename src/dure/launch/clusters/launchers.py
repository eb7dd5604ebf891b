"""Programs that start ranks themselves, and so should not be started by `dure run`."""

from __future__ import annotations

from pathlib import Path

from dure.launch.spec import JobSpec

__all__ = ["launcher_note"]

_PROGRAMS = frozenset({"torchrun", "deepspeed", "mpirun", "mpiexec", "srun"})
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
}


def launcher_note(spec: JobSpec) -> str:
    """Return a line for the user if the program is a launcher itself; else an empty one."""
    name = Path(spec.program).name
    if spec.kind == "module":
        launcher = _MODULES.get(spec.program)
    elif name == "accelerate" and spec.args[:1] == ("launch",):
        launcher = "accelerate launch"
    else:
        launcher = name if name in _PROGRAMS else None
    if launcher is None:
        return ""
    return (
        f"{launcher} starts ranks itself, and `dure run` would start it {spec.nproc} times. Leave "
        f"out one of them: `dure run --nproc N PROGRAM` does what `{launcher}` does"
    )
