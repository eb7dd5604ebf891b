"""What a rank of `dure plan --here` runs: pieces of a training step, timed (`here`)."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import dure
from dure.plan.measured import pieces

_ENOUGH_S, _LEAST = 0.4, 5
_REPEATS = {8: 200}  # of collectives, by bytes: as many on all ranks; others 12
_OTHER_REPEATS = 12


class _Layer(nn.Module):
    """A layer of Llama's shape."""

    turns: torch.Tensor

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.one, self.two = (nn.RMSNorm(width, 1e-5) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.register_buffer("turns", torch.rand(2, 1, width // heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [1, t, width] to the same shape."""
        y = self.one(x)
        q, k, v = (f(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in self.qkv)
        y = F.scaled_dot_product_attention(self._turned(q), self._turned(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.two(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, -1)
        return x * self.turns[0] + torch.cat([-two, one], -1) * self.turns[1]


class Pieces:
    """What a rank times: each method returns seconds, or what else it found."""

    def product(self, m: int, n: int, k: int) -> float:
        """Time a matrix product of a weight that lies as `nn.Linear` has it."""
        a, b = torch.randn(m, k), torch.randn(n, k)
        return _timed(lambda: F.linear(a, b))

    def stream(self, elements: int) -> float:
        """Time the sum of two tensors: two read, one written."""
        a, b, c = (torch.zeros(elements) for _ in range(3))
        return _timed(lambda: torch.add(a, b, out=c))

    def attention(self, tokens: int, width: int, heads: int) -> float:
        """Time causal attention, forward and backward."""
        q, k, v = (
            torch.randn(1, heads, tokens, width // heads, requires_grad=True) for _ in range(3)
        )

        def run() -> None:
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

        return _timed(run)

    def layer(self, tokens: int, width: int, hidden: int, heads: int, backward: int = 1) -> float:
        """Time a layer, forward and, if asked for, backward."""
        layer, x = _Layer(width, hidden, heads), torch.randn(1, tokens, width, requires_grad=True)

        def run() -> None:
            y = layer(x)
            if backward:
                y.backward(x.detach())

        return _timed(run)

    def loss(self, tokens: int, vocabulary: int) -> float:
        """Time the loss of scores, forward and backward."""
        scores = torch.randn(tokens, vocabulary, requires_grad=True)
        targets = torch.randint(vocabulary, (tokens,))
        return _timed(lambda: F.cross_entropy(scores, targets).backward())

    def adam(self, parameters: int) -> float:
        """Time an update of some parameters, in eight tensors."""
        each = [nn.Parameter(torch.zeros(parameters // 8)) for _ in range(8)]
        for one in each:
            one.grad = torch.zeros_like(one)
        return _timed(torch.optim.AdamW(each).step)

    def all_reduce(self, num_bytes: int) -> float:
        """Time a sum over all ranks."""
        tensor = torch.zeros(num_bytes // 4)
        return _together(lambda: dure.all_reduce(tensor), num_bytes)

    def message(self, num_bytes: int) -> float:
        """Time a message from rank 0 to rank 1: half of one there and back."""
        tensor = torch.zeros(num_bytes // 4)

        def there_and_back() -> None:
            if dure.get_rank() == 0:
                dure.send(tensor, 1)
                dure.recv(tensor, 1)
            elif dure.get_rank() == 1:
                dure.recv(tensor, 0)
                dure.send(tensor, 0)

        return _together(there_and_back, num_bytes) / 2

    def held(self) -> float:
        """Return the bytes of this process that are no file's, and its part of shared ones."""
        rows = Path("/proc/self/smaps_rollup").read_text().splitlines()
        kinds = ("Pss_Anon", "Pss_Shmem")
        return 1024.0 * sum(int(row.split()[1]) for row in rows if row.startswith(kinds))


def _timed(run: Callable[[], object]) -> float:
    """Return the median time of a piece, run again and again while the other ranks do the same."""
    run()
    dure.barrier()
    end, times = time.perf_counter() + _ENOUGH_S, list[float]()
    while len(times) < _LEAST or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _together(run: Callable[[], object], num_bytes: int) -> float:
    """Return the median time of what all ranks do together, as often on each."""
    times: list[float] = []
    for _ in range(_REPEATS.get(num_bytes, _OTHER_REPEATS)):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    """Time each piece, and report the means of all ranks."""
    torch.set_num_threads(1)
    dure.init_process_group()
    timer, found = Pieces(), dict[str, float]()
    for name, (piece, arguments) in pieces(dure.get_world_size()).items():
        value = torch.tensor(getattr(timer, piece)(**arguments), dtype=torch.float64)
        dure.all_reduce(value, dure.ReduceOp.AVG)
        found[name] = value.item()
    if dure.get_rank() == 0:
        print(json.dumps({"dure": found}), flush=True)
    dure.destroy_process_group()


if __name__ == "__main__":
    main()
