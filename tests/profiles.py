"""What a function leaves in a profile of torch, for tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_OTHERS = ("aten::", "autograd::", "torch::", "detach")
_BACKWARD = ("Backward0", "BackwardBackward", "_AfterBackward")


def profile_of(rank: int, run: Callable[[], object]) -> Any:
    """Run a function, on rank 0 in a profile, which is returned (Any: torch's profile; or None).

    A process has one profile at a time, and ranks may be threads of one.
    """
    if rank:
        run()
        return None
    with torch.profiler.profile(record_shapes=True) as profile:
        run()
    return profile


def steps_of(model: torch.nn.Module) -> Callable[[], None]:
    """Return a training step of a model of 8 inputs, which has made two of them."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return step


def names_in(profile: Any) -> list[str]:
    """Return the names of Dure's records and of optimizers', the first to begin first."""
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [event.name for event in events]
    return [n for n in names if not n.startswith(_OTHERS) and not n.endswith(_BACKWARD)]


def arguments_in(profile: Any, folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return names and arguments of the records that have some of Dure's, as a trace has them."""
    path = folder / "trace.json"
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    shown = [e for e in events if "Group size" in e.get("args", {})]
    return [(e["name"], e["args"]) for e in sorted(shown, key=lambda e: e["ts"])]
