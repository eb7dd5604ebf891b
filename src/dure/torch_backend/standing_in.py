"""Dure under the name "gloo", for clients that know no other name.

Hugging Face's Trainer, Accelerate, ignite and others compare a backend's name with a list. Here
torch makes groups of Dure if a program asks for Gloo's, and these have the name "gloo".

Torch's function `_new_process_group_helper` makes every group, of the backend that it is given.
`_StandIn` wraps it: it passes the backend "dure_as_gloo" if the program asked for "gloo" (or for
no backend, and Gloo is the default), and then writes "gloo" into torch's list of groups.

Groups of several backends, such as "cpu:gloo,cuda:nccl", keep torch's Gloo: a group of Dure would
replace both (see `identity`). Torch's Gloo alone is the backend "torch_gloo".

``import torch`` imports this module if DURE_STAND_IN is set: it imports nothing of Dure that takes
long.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any, NoReturn

import torch
from torch.distributed import distributed_c10d

from dure import env
from dure.errors import UsageError
from dure.torch_backend import records_itself

__all__ = ["GLOO", "TORCH_GLOO", "install", "install_from_environment"]

GLOO = "gloo"
"""The only backend that Dure can replace."""
TORCH_GLOO = "torch_gloo"
"""The name of torch's Gloo if Dure has replaced it."""

_AS_GLOO = "dure_as_gloo"
_MAKES_GROUPS = "_new_process_group_helper"
_torch: Any = distributed_c10d  # its stub leaves out what is used here
_gloo: Any = getattr(_torch, "ProcessGroupGloo", None)


def install(name: str, *, announce: bool = True) -> None:
    """Replace the backend `name` in this process; see `dure.torch_backend.stand_in`.

    Raises:
        UsageError: It is not "gloo"; torch was built without Gloo, or has no such function.
    """
    if name != GLOO:
        _refuse(name)
    if _gloo is None or not hasattr(_torch, _MAKES_GROUPS):
        raise UsageError(
            "Dure cannot replace Gloo in this torch",
            seen=f"torch {torch.__version__} without Gloo, or without {_MAKES_GROUPS}",
            fix='Name the backend "dure", or use a version that docs/install.md lists.',
        )
    installed: _StandIn | None = getattr(_torch, _MAKES_GROUPS).__dict__.get("dure")
    if installed is not None:
        installed.announce = announce
        return
    _StandIn(announce).install()


def install_from_environment() -> None:
    """Replace the backend that DURE_STAND_IN names, if it names one.

    ``import torch`` calls this, and must not fail: an error is raised when a group is made.
    """
    name = env.text("DURE_STAND_IN")
    if name is None:
        return
    try:
        install(name, announce=not env.flag("DURE_STAND_IN_QUIET"))
    except UsageError as error:
        _fail_later(error)


def _refuse(name: object) -> NoReturn:
    raise UsageError(
        "Dure can replace no backend but gloo",
        seen=f"{name!r}, from stand_in() or DURE_STAND_IN",
        fix='Use the name "gloo". Backends for GPUs, as nccl, have no stand-in.',
    )


def _fail_later(error: UsageError) -> None:
    """Have torch raise `error` when it makes a group."""

    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise error

    setattr(_torch, _MAKES_GROUPS, fail)


class _StandIn:
    """The replacement of Gloo by Dure in one process.

    Args:
        announce: Whether rank 0 prints a line when it makes its first group, and one when a group
            first keeps torch's Gloo.

    Attributes:
        announce: The same, and may be changed.
    """

    def __init__(self, announce: bool) -> None:
        self.announce = announce
        self._said = set[str]()
        self._torchs_function = getattr(_torch, _MAKES_GROUPS)
        self._signature = inspect.signature(self._torchs_function)

    def install(self) -> None:
        """Register the two backends, and wrap torch's function."""
        both: dict[str, Any] = {"extended_api": True, "devices": ["cpu", "cuda"]}
        _torch.Backend.register_backend(_AS_GLOO, self._create, **both)
        _torch.Backend.register_backend(TORCH_GLOO, _create_torch_gloo, **both)
        records_itself(_AS_GLOO)
        records_itself(TORCH_GLOO)

        def create_group(*args: Any, **kwargs: Any) -> Any:
            return self._create_group(self._signature.bind(*args, **kwargs))

        create_group.__dict__["dure"] = self
        setattr(_torch, _MAKES_GROUPS, create_group)
        torch.distributed.ProcessGroupGloo = _torch.ProcessGroupGloo = _gloo_type()

    def _create_group(self, call: inspect.BoundArguments) -> tuple[Any, Any]:
        """Make a group as torch does, but of Dure if the call asks for Gloo alone."""
        wanted = call.arguments["backend"]
        backends = _torch.BackendConfig(_torch.Backend(wanted))
        names = set(backends.get_device_backend_map().values())
        if names != {GLOO}:
            if GLOO in names and env.text("RANK", "0") == "0":
                self._say("kept", f"{wanted} keeps torch's gloo: Dure replaces gloo alone")
            return self._torchs_function(*call.args, **call.kwargs)
        call.arguments["backend"] = _torch.Backend(_AS_GLOO)
        group, store = self._torchs_function(*call.args, **call.kwargs)
        if store is not None:  # this rank is a member
            _torch._world.pg_map[group] = (wanted, store)
            _torch._world.pg_backend_config[group] = str(backends)
        return group, store

    def _create(self, options: Any, backend_options: object = None) -> Any:
        """Make a group of Dure with the name "gloo"; torch calls this (`extended_api`)."""
        from dure.torch_backend.create import create  # lazy: `import torch` must not pay for it

        group = create(options, backend_options, GLOO)
        if group.ours.global_ranks[group.rank()] == 0:
            self._say(
                "replaced",
                f"Dure replaces gloo: {group.size()} ranks over {group.ours.name()} "
                "(DURE_STAND_IN_QUIET=1 hides this line)",
            )
        return group

    def _say(self, event: str, text: str) -> None:
        """Print a line about the first event of its kind."""
        if self.announce and event not in self._said:
            self._said.add(event)
            print(f"[dure] {text}", file=sys.stderr, flush=True)


def _create_torch_gloo(options: Any, backend_options: object = None) -> Any:
    """Make a group of torch's Gloo; torch calls this (`extended_api`)."""
    del backend_options
    group = _gloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
    group.options.global_ranks_in_group = options.global_ranks_in_group
    group.options.group_name = options.group_id
    return group


def _gloo_type() -> type:
    """Return a class that makes torch's Gloo groups, and has Dure's as instances, too.

    Torch and its clients ask for the class before they set a timeout, for example.
    """

    def is_gloo(_: type, thing: Any) -> bool:
        return isinstance(thing, _gloo) or (hasattr(thing, "ours") and thing.name() == GLOO)

    def make(_: type, *args: Any, **kwargs: Any) -> Any:
        return _gloo(*args, **kwargs)

    kind: Any = type("GlooType", (type(_gloo),), {"__instancecheck__": is_gloo, "__call__": make})
    return kind("ProcessGroupGloo", (_gloo,), {"__module__": _gloo.__module__})
