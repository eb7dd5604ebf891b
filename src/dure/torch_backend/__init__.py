"""The plug-in for stock PyTorch: ``torch.distributed.init_process_group("dure")``.

Importing this package registers the name with torch.distributed. Programs need not import it: the
entry point `torch.backends` of the distribution makes torch itself call `autoload` at the end of
``import torch``. So this file imports nothing of Dure; `create`, which makes groups, is imported
with the first group. A broken installation then fails in programs that ask for "dure", and not in
``import torch``.

The parts: `create` and `engine` choose Dure's backend and build a group; `group.TorchGroup` is the
object that torch.distributed uses, with properties in `identity` and operations in `reductions`,
`moves` and `messages`; `work` is a pending operation; `store` adapts torch's store. `standing_in`
replaces Gloo for programs that know no other name.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["NAME", "autoload", "make_default", "register", "stand_in"]

NAME = "dure"
"""The backend's name, for `init_process_group`."""


def register() -> None:
    """Register "dure" with torch.distributed for CPU and CUDA tensors.

    A second call changes nothing.

    Does nothing if torch was built without torch.distributed.

    Cost:
        Microseconds, once torch is imported.

    Example:
        ```python
        import torch.distributed
        from dure import torch_backend

        torch_backend.register()  # `import torch` does it, too, where Dure is installed
        assert torch.distributed.is_backend_available("dure")
        ```
    """
    import torch.distributed as torch_dist  # lazy: torch loads this module while it is imported

    if not torch_dist.is_available() or NAME in torch_dist.Backend.backend_list:
        return
    torch_dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    records_itself(NAME)


def records_itself(name: str) -> None:
    """Keep the hook of torch's flight recorder, new in torch 2.15, off groups of this backend.

    Dure has a flight recorder (`dure.trace`). The hook needs a backend in C++, which Dure's groups
    do not have, so torch would fail to make a group.
    """
    from torch.distributed import distributed_c10d  # lazy: see `register`

    getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]()).add(name)


def autoload() -> None:
    """Register "dure"; torch calls this by the entry point `torch.backends`.

    If DURE_STAND_IN is set, Dure replaces the backend that it names (see `stand_in`). If a
    program imports this module before torch, torch calls this during `register`.

    Example:
        ```python
        torch_backend.autoload()  # torch does so; `register` is for programs
        ```
    """
    register()
    # Read here and not by dure.env, which `import torch` would pay for in every program.
    if os.environ.get("DURE_STAND_IN"):
        from dure.torch_backend import standing_in  # lazy: most programs do not need it

        standing_in.install_from_environment()


def make_default() -> None:
    """Make "dure" torch's default backend for CPU tensors instead of Gloo.

    Registering a backend does not change the default. Programs that name a backend are not
    affected.

    Example:
        ```python
        torch_backend.make_default()
        defaults = torch.distributed.Backend.default_device_backend_map
        assert defaults["cpu"] == "dure"
        defaults["cpu"] = "gloo"  # torch's own default again
        ```
    """
    import torch.distributed as torch_dist  # lazy: torch loads this module while it is imported

    torch_dist.Backend.default_device_backend_map["cpu"] = NAME


def stand_in(name: str, *, announce: bool = True) -> None:
    """Replace the backend `name` of stock torch in this process and in those that it starts.

    For programs and libraries that accept only backends whose names they know: groups of Gloo are
    groups of Dure from now on, and `dist.get_backend()` returns "gloo". Rank 0 prints a line when
    it makes its first group. Groups of several backends ("cpu:gloo,cuda:nccl") keep torch's Gloo;
    torch's Gloo alone is the backend "torch_gloo".

    The environment variable DURE_STAND_IN, or `dure run --stand-in-gloo`, does the same without a
    change to the program.

    Args:
        name: "gloo".
        announce: Whether rank 0 prints the line.

    Raises:
        UsageError: Dure does not replace that backend, or not in this version of torch.

    Example:
        ```python
        import torch.distributed as dist
        import dure.torch_backend

        dure.torch_backend.stand_in("gloo")
        dist.init_process_group("gloo")  # Dure's engine
        ```
    """
    from dure import env  # lazy: `import torch` must not pay for it
    from dure.torch_backend import standing_in  # lazy: the same

    standing_in.install(name, announce=announce)
    env.put("DURE_STAND_IN", name)
    env.put("DURE_STAND_IN_QUIET", None if announce else "1")


def _create(options: Any, backend_options: object = None) -> Any:
    """Make this rank's side of a group; torch calls this (`extended_api`)."""
    from dure.torch_backend.create import create  # lazy: `import torch` must not pay for it

    return create(options, backend_options)


autoload()
