"""The plug-in for stock PyTorch: ``torch.distributed.init_process_group("dure")``.

Importing this package registers the name with torch.distributed. Programs need not import it: the
entry point `torch.backends` of the distribution makes torch itself call `autoload` at the end of
``import torch``. So this file imports nothing of Dure; `create`, which makes groups, is imported
with the first group. A broken installation then fails in programs that ask for "dure", and not in
``import torch``.

The parts: `create` and `engine` choose Dure's backend and build a group; `group.TorchGroup` is the
object that torch.distributed uses, with properties in `identity` and operations in `reductions`,
`moves` and `messages`; `work` is a pending operation; `store` adapts torch's store.
"""

from __future__ import annotations

from typing import Any

__all__ = ["NAME", "autoload", "make_default", "register"]

NAME = "dure"
"""The backend's name, for `init_process_group`."""


def register() -> None:
    """Register "dure" with torch.distributed for CPU and CUDA tensors.

    A second call changes nothing.

    Does nothing if torch was built without torch.distributed.

    Cost:
        Microseconds, once torch is imported.
    """
    import torch.distributed as torch_dist  # lazy: torch loads this module while it is imported

    if not torch_dist.is_available() or NAME in torch_dist.Backend.backend_list:
        return
    torch_dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def autoload() -> None:
    """Register "dure"; torch calls this by the entry point `torch.backends`.

    If a program imports this module before torch, torch calls this during `register`.
    """
    register()


def make_default() -> None:
    """Make "dure" torch's default backend for CPU tensors instead of Gloo.

    Registering a backend does not change the default. Programs that name a backend are not
    affected.
    """
    import torch.distributed as torch_dist  # lazy: torch loads this module while it is imported

    torch_dist.Backend.default_device_backend_map["cpu"] = NAME


def _create(options: Any, backend_options: object = None) -> Any:
    """Make this rank's side of a group; torch calls this (`extended_api`)."""
    from dure.torch_backend.create import create  # lazy: `import torch` must not pay for it

    return create(options, backend_options)


register()
