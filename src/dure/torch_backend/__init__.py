"""The plug-in for stock PyTorch: ``torch.distributed.init_process_group("dure")``.

Importing this package registers the name with torch.distributed. It need not be imported: the
entry point `torch.backends` of the distribution makes torch itself call `autoload` at the end of
``import torch``. For that reason this file is light: it imports nothing of Dure, and what really
makes a group (`create`, with all that it needs) is imported when the first group is made. A broken
installation shows there, in the program that asked for "dure", and not in ``import torch``.

The parts: `create` chooses the engine and builds a group; `group.TorchGroup` is the object that
torch.distributed works with, made of `identity` (who and what), `reductions`, `moves` and
`messages` (the operations); `work` is a pending operation; `store` is torch's store in our terms.
"""

from __future__ import annotations

from typing import Any

__all__ = ["NAME", "autoload", "make_default", "register", "register_dist2"]

NAME = "dure"
"""What programs give to `init_process_group`."""


def register() -> None:
    """Register "dure" with torch.distributed for CPU tensors; a second call changes nothing.

    Where torch was built without torch.distributed there is nothing to register with, and this
    does nothing.

    Cost:
        Microseconds, once torch is imported.
    """
    import torch.distributed as torch_dist  # lazy: torch loads this module while it is imported

    if not torch_dist.is_available() or NAME in torch_dist.Backend.backend_list:
        return
    torch_dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def autoload() -> None:
    """Do what the entry point `torch.backends` is for; importing this module has done it already.

    When a program imports this module first, torch calls this in the middle of `register`.
    """
    register()


def make_default() -> None:
    """Make "dure" what torch takes for CPU tensors where a program names no backend.

    Without this, that is Gloo: registering a backend for a device does not change its default,
    and installing a package should not either. Programs that do name a backend are not touched.
    """
    import torch.distributed as torch_dist  # lazy: torch loads this module while it is imported

    torch_dist.Backend.default_device_backend_map["cpu"] = NAME


def register_dist2() -> None:
    """Register "dure" with torch's experimental `torch.distributed._dist2` as well.

    Not done by `register`, because importing that module takes longer than all the rest.
    """
    from torch.distributed import _dist2  # lazy: torch loads this module while it is imported

    if NAME not in _dist2._BACKENDS:  # pyright: ignore[reportPrivateUsage]
        _dist2.register_backend(NAME, _create_dist2)


def _create(options: Any, backend_options: object = None) -> Any:
    """Make this rank's side of a group: what torch calls with `extended_api`."""
    from dure.torch_backend.create import create  # lazy: `import torch` must not pay for it

    return create(options, backend_options)


def _create_dist2(
    store: Any, rank: int, world_size: int, timeout: Any, device: object, **options: object
) -> Any:
    """Make this rank's side of a group: what torch's `_dist2` calls."""
    from dure.torch_backend.create import create_dist2  # lazy: as in `_create`

    return create_dist2(store, rank, world_size, timeout, device, options)


register()
