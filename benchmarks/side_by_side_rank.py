"""One rank of benchmarks/side_by_side.py: cases of one library, run as often as it is told.

    python side_by_side_rank.py ADDRESS LIBRARY CASES

LIBRARY is dure, or torch (torch.distributed on gloo, RPC on TensorPipe). A case is a function that
is given the library, and returns what is called again and again; all ranks call it, but of remote
calls only rank 0. The two libraries have the same names, so each case is written once.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any  # Any: modules of two libraries

import torch
from compared.rank import serve

KIB, MIB = 1 << 10, 1 << 20
Call = Callable[[], object]


class Library:
    """The modules of one library, and its ranks' group.

    Args:
        name: "dure" or "torch".
        remote: Whether the ranks are workers for remote calls.

    Attributes:
        folder: For checkpoints.
    """

    def __init__(self, name: str, remote: bool) -> None:
        self.dist: Any
        self.rpc: Any
        self.autograd: Any
        self.tensor: Any
        self.checkpoint: Any
        if name == "dure":
            import dure  # lazy: the other library's ranks do without
            import dure.checkpoint
            import dure.rpc
            import dure.tensor

            self.dist, self.rpc, self.autograd = dure, dure.rpc, dure.autograd
            self.tensor, self.checkpoint = dure.tensor, dure.checkpoint
        else:
            import torch.distributed.autograd
            import torch.distributed.checkpoint
            import torch.distributed.rpc
            import torch.distributed.tensor

            self.dist, self.rpc = torch.distributed, torch.distributed.rpc
            self.autograd = torch.distributed.autograd
            self.tensor = torch.distributed.tensor
            self.checkpoint = torch.distributed.checkpoint
        self.rank, self._remote = int(os.environ["RANK"]), remote
        self.folder, self._numbers = Path(), itertools.count()
        if remote:
            self.rpc.init_rpc(f"worker{self.rank}", rank=self.rank, world_size=2)
        else:
            self.dist.init_process_group("shm" if name == "dure" else "gloo")

    @property
    def mesh(self) -> Any:
        """A mesh of both ranks."""
        return self.dist.init_device_mesh("cpu", (2,))

    def new_folder(self) -> Path:
        """Return the path of a folder that does not exist, the same on both ranks."""
        number = next(self._numbers)
        if number > 1 and self.rank == 0:
            shutil.rmtree(self.folder / str(number - 2), ignore_errors=True)
        return self.folder / str(number)

    def leave(self) -> None:
        """End the group, or RPC."""
        if self._remote:
            self.rpc.shutdown()
        else:
            self.dist.destroy_process_group()


# --- remote calls ---------------------------------------------------------------------------------

_kept: dict[int, torch.Tensor] = {}


def nothing() -> None:
    """Do nothing."""


def take(_: torch.Tensor) -> None:
    """Take a tensor."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor."""
    return tensor


def give(nbytes: int) -> torch.Tensor:
    """Return the same tensor at each call."""
    if nbytes not in _kept:
        _kept[nbytes] = torch.ones(nbytes // 4)
    return _kept[nbytes]


def weight() -> torch.Tensor:
    """Return a parameter."""
    return torch.randn(64, 64, requires_grad=True)


def product(x: torch.Tensor, reference: Any) -> torch.Tensor:
    """Return the product with a parameter of this worker."""
    return (x @ reference.local_value()).relu()


def _call(function: Any, *args: Any) -> Callable[[Library], Call]:
    return lambda library: partial(library.rpc.rpc_sync, "worker1", function, args=args)


def _in_flight(library: Library) -> Call:
    def burst() -> None:
        for future in [library.rpc.rpc_async("worker1", nothing) for _ in range(64)]:
            future.wait()

    return burst


def _remote(library: Library) -> Call:
    return lambda: library.rpc.remote("worker1", nothing).to_here()


def _backward(library: Library) -> Call:
    reference = library.rpc.remote("worker1", weight)
    x = torch.randn(8, 64, requires_grad=True)

    def there_and_back() -> None:
        with library.autograd.context() as context:
            loss = library.rpc.rpc_sync("worker1", product, args=(x, reference)).sum()
            library.autograd.backward(context, [loss])
            library.autograd.get_gradients(context)

    return there_and_back


_TENSORS = {"1 KiB": KIB, "1 MiB": MIB, "64 MiB": 64 * MIB}
RPC: dict[str, Callable[[Library], Call]] = {
    "empty call": _call(nothing),
    **{f"{n} there": _call(take, torch.ones(size // 4)) for n, size in _TENSORS.items()},
    **{f"{n} back": _call(give, size) for n, size in _TENSORS.items()},
    **{f"{n} echoed": _call(echo, torch.ones(size // 4)) for n, size in _TENSORS.items()},
    "64 calls in flight": _in_flight,
    "remote() and to_here()": _remote,
    "distributed autograd, 64 x 64": _backward,
}


# --- sharded tensors ------------------------------------------------------------------------------


def _move(before: str, after: str, nbytes: int) -> Callable[[Library], Call]:
    def make(library: Library) -> Call:
        placements = {
            "Shard(0)": library.tensor.Shard(0),
            "Shard(1)": library.tensor.Shard(1),
            "Partial": library.tensor.Partial(),
            "Replicate": library.tensor.Replicate(),
        }
        side = int((nbytes // 4) ** 0.5)
        shape = (side // 2, side) if before == "Shard(0)" else (side, side)
        source = library.tensor.DTensor.from_local(
            torch.ones(shape), library.mesh, [placements[before]], run_check=False
        )
        to = [placements[after]]

        def move() -> object:
            return source.redistribute(placements=to).to_local()[0, 0].item()

        return move

    return make


def _operator(apply: Callable[[Any, Any], Any], backward: bool) -> Callable[[Library], Call]:
    def make(library: Library) -> Call:
        mesh, shard = library.mesh, [library.tensor.Shard(0)]
        from_local = library.tensor.DTensor.from_local
        x = from_local(torch.ones(4, 8), mesh, shard).detach().requires_grad_(backward)
        full = [library.tensor.Replicate()]
        w = from_local(torch.ones(8, 8), mesh, full).detach().requires_grad_(backward)
        ones = apply(x, w).detach()

        def forward() -> object:
            return apply(x, w)

        def both() -> None:
            apply(x, w).backward(ones)
            x.grad = w.grad = None

        return both if backward else forward

    return make


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, _: x + x,
    "matmul": lambda x, w: x @ w,
    "relu": lambda x, _: x.relu(),
    "view": lambda x, _: x.view(-1, 4),
    "layer_norm": lambda x, _: torch.nn.functional.layer_norm(x, (8,)),
}
_MOVES = [
    ("Shard(0)", "Replicate"),
    ("Partial", "Replicate"),
    ("Shard(0)", "Shard(1)"),
    ("Partial", "Shard(0)"),
]
TENSORS: dict[str, Callable[[Library], Call]] = {
    **{f"{name}, forward": _operator(apply, False) for name, apply in _OPERATORS.items()},
    **{f"{n}, forward and backward": _operator(apply, True) for n, apply in _OPERATORS.items()},
    **{f"{a} to {b}, 4 KiB": _move(a, b, 4 * KIB) for a, b in _MOVES},
    **{f"{a} to {b}, 64 MiB": _move(a, b, 64 * MIB) for a, b in _MOVES},
}


# --- checkpoints ----------------------------------------------------------------------------------

_NUM_TENSORS, _ROWS, _COLUMNS = 64, 1024, 1024  # 256 MiB


def _state(library: Library) -> dict[str, Any]:
    local = torch.ones(_ROWS // 2, _COLUMNS)
    mesh, shard = library.mesh, [library.tensor.Shard(0)]
    from_local = library.tensor.DTensor.from_local
    return {f"layer.{n}": from_local(local.clone(), mesh, shard) for n in range(_NUM_TENSORS)}


def _save(library: Library) -> Call:
    state = _state(library)
    return lambda: library.checkpoint.save(state, checkpoint_id=library.new_folder())


def _load(library: Library) -> Call:
    state = _state(library)
    path = library.new_folder()
    library.checkpoint.save(state, checkpoint_id=path)
    return lambda: library.checkpoint.load(state, checkpoint_id=path)


CHECKPOINT: dict[str, Callable[[Library], Call]] = {
    "save 256 MiB": _save,
    "load 256 MiB": _load,
}


# --- the rank -------------------------------------------------------------------------------------

CASES = {"rpc": RPC, "tensors": TENSORS, "checkpoint": CHECKPOINT}


class Rank:
    """Its methods are the controller's commands.

    Args:
        library: "dure" or "torch".
        cases: One of `CASES`.
    """

    def __init__(self, library: str, cases: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.label, self.version = library, torch.__version__
        self._library, self._cases = Library(library, cases == "rpc"), CASES[cases]
        self.rank = self._library.rank
        self._idle = cases == "rpc" and self.rank == 1  # it serves the other one's calls
        self._call: Call = nothing

    def prepare(self, case: str, folder: str) -> dict[str, Any]:
        """Make what a case calls, and call it twice; checkpoints go below `folder`."""
        self._library.folder = Path(folder)
        self._call = nothing if self._idle else self._cases[case](self._library)
        self._call()
        self._call()
        return {}

    def run(self, count: int) -> dict[str, Any]:
        """Call it; return the seconds of all calls together."""
        begin = time.perf_counter()
        for _ in range(count):
            self._call()
        return {"seconds": time.perf_counter() - begin}

    def forget(self) -> dict[str, Any]:
        """Let go of it."""
        self._call = nothing
        _kept.clear()
        return {}

    def leave(self) -> None:
        """End the group."""
        self._library.leave()


if __name__ == "__main__":
    rank = Rank(*sys.argv[2:])
    serve(sys.argv[1], rank, rank)
    rank.leave()
