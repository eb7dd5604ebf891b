"""Running replicas at the same time, one thread each.

The first replica runs in the calling thread, the others in threads that get what the caller has:
gradients on or off, autocast, its context variables (and so its process group), and, on a GPU, its
current stream. Replicas on the CPU share the caller's threads inside operators, so that n replicas
do not ask for n times as many cores.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from dure.errors import UsageError
from dure.parallel.dp.devices import Device, as_device, home_of
from dure.parallel.dp.random import OwnRandom

__all__ = ["parallel_apply"]

_Surrounding = Callable[[], AbstractContextManager[Any]]
"""Makes a context manager for a thread."""


def parallel_apply(
    modules: Sequence[torch.nn.Module],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[dict[str, Any]] | None = None,
    devices: Sequence[Device | None] | None = None,
) -> list[Any]:
    """Call each module with its own arguments, all at the same time.

    Args:
        modules: The modules; two may be the same object only if its forward writes to nothing.
        inputs: For each its positional arguments: a list or tuple of them, or the only one.
        kwargs_tup: For each its keyword arguments.
        devices: For each its device; by default where its parameters are.

    Returns:
        The results, in order.

    Raises:
        UsageError: There are not as many arguments as modules.
        Exception: Raised by the first failing module, with a note that names it;
            all have ended by then.

    Numerics:
        In training, with several replicas on the CPU, one number is drawn from the default
        generator; it seeds a generator for each replica.
    """
    count = len(modules)
    keywords = kwargs_tup if kwargs_tup is not None else [{}] * count
    places = devices if devices is not None else [None] * count
    if not len(inputs) == len(keywords) == len(places) == count:
        raise UsageError(
            "parallel_apply needs as many arguments as modules",
            seen=f"{count} modules, {len(inputs)} inputs, {len(keywords)} kwargs, "
            f"{len(places)} devices",
            fix="Give one of each for every module.",
        )
    where = [
        home_of(module) if place is None else as_device(place, home_of(module).type)
        for module, place in zip(modules, places, strict=True)
    ]
    replicas = _Replicas(modules, inputs, keywords, where)
    with _cores_shared_by(sum(d.type == "cpu" for d in where)):
        replicas.run()
    return replicas.outcome()


class _Replicas:
    """One call of `parallel_apply`. Threads: each writes to its own places of the lists."""

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        inputs: Sequence[Any],
        keywords: Sequence[dict[str, Any]],
        devices: Sequence[torch.device],
    ) -> None:
        self.modules, self.inputs, self.keywords = modules, inputs, keywords
        self.devices = devices
        self.surroundings = [_surroundings(d) for d in devices]
        self.results: list[Any] = [None] * len(modules)
        self.errors: list[BaseException | None] = [None] * len(modules)
        seeds = _seeds(modules, devices)
        for surrounding, seed in zip(self.surroundings, seeds, strict=True):
            if seed is not None:
                surrounding.append(lambda seed=seed: OwnRandom(seed))

    def run(self) -> None:
        """Run all; return when all have ended."""
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._run_one, i),
                name=f"dure-replica-{i}",
                daemon=True,
            )
            for i in range(1, len(self.modules))
        ]
        for thread in threads:
            thread.start()
        try:
            if self.modules:
                self._run_one(0)
        finally:
            for thread in threads:
                thread.join()

    def _run_one(self, i: int) -> None:
        given = self.inputs[i]
        args = given if isinstance(given, list | tuple) else (given,)
        try:
            with ExitStack() as stack:
                for surrounding in self.surroundings[i]:
                    stack.enter_context(surrounding())
                self.results[i] = self.modules[i](*args, **self.keywords[i])
        except BaseException as e:  # SystemExit, say, which would only end the replica's thread
            self.errors[i] = e

    def outcome(self) -> list[Any]:
        """Return the results, or raise the first error."""
        for i, error in enumerate(self.errors):
            if error is not None:
                error.add_note(
                    f"raised in replica {i} of {len(self.modules)}, on {self.devices[i]}"
                )
                raise error
        return self.results


def _surroundings(device: torch.device) -> list[_Surrounding]:
    """Collect what the calling thread has switched on, to be entered by another."""
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    found: list[_Surrounding] = [
        lambda: torch.inference_mode(inference),
        lambda: torch.set_grad_enabled(grad),
    ]
    for kind in sorted({"cpu", device.type}):
        if torch.is_autocast_enabled(kind):
            dtype, cache = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
            found.append(
                lambda kind=kind, dtype=dtype, cache=cache: torch.autocast(
                    kind, dtype, cache_enabled=cache
                )
            )
    if device.type != "cpu":
        accelerator: Any = torch.get_device_module(device.type)  # Any: torch.cuda and its kin
        stream = accelerator.current_stream(device)
        found += [lambda: accelerator.device(device), lambda: accelerator.stream(stream)]
    return found


def _seeds(modules: Sequence[torch.nn.Module], devices: Sequence[torch.device]) -> list[int | None]:
    """Draw a seed for each replica that trains in a thread; None for one that needs none."""
    together = [m.training and d.type == "cpu" for m, d in zip(modules, devices, strict=True)]
    if sum(together) < 2:
        return [None] * len(modules)
    base = int(torch.randint(1 << 62, (), device="cpu"))
    return [base + i if drawing else None for i, drawing in enumerate(together)]


@contextmanager
def _cores_shared_by(count: int) -> Iterator[None]:
    """Divide the threads that operators use among `count` replicas on the CPU."""
    before = torch.get_num_threads()
    if count < 2 or before < 2:
        yield
        return
    torch.set_num_threads(max(1, before // count))  # new threads start with it
    try:
        yield
    finally:
        torch.set_num_threads(before)
