"""Counts which operators of torch's database DTensors compute rightly.

    python benchmarks/operators.py [NAMES ...] [--torch] [--most 8] [--ways 12] [--mesh 4] [--terms]

Each sample input is run on thread-ranks, forward and backward, with its tensors replicated and
sharded on each dimension in turn (`--ways` ways a sample, `--most` samples an operator), and
compared with the unsharded operator (tests/tensor/ranks/operators.py). An operator is *right* if
all its calls are; else it is what the worst of them is: *refused* by a typed error, *crashed* by
another, or *wrong*. With `--torch`, `torch.distributed.tensor` runs the same calls, on torch's own
simulated ranks (LocalTensorMode). Random results are compared by shape and dtype only.
"""

# Torch's DTensor has no types, and its simulation no public names.
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# pyright: reportPrivateUsage=false, reportOptionalMemberAccess=false

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.tensor.ranks.operators import (
    OUTCOMES,
    REFUSED,
    RIGHT,
    Result,
    Run,
    Sample,
    Way,
    database,
    judge,
    outcomes,
    ways,
)
from tests.tensor.ranks.parts import difference


class Theirs:
    """DTensors of torch, on ranks that one process simulates."""

    def __init__(self, sizes: Sequence[int]) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh = init_device_mesh("cpu", tuple(sizes))
        self.exact = True

    def make(self, whole: torch.Tensor, placements: Iterable[Any]) -> Any:
        """Distribute a tensor."""
        from torch.distributed import tensor as theirs

        given = [theirs.Shard(p.dim) if p.is_shard() else theirs.Replicate() for p in placements]
        made = theirs.distribute_tensor(whole.detach(), self.mesh, given, src_data_rank=None)
        return made.requires_grad_(whole.requires_grad)

    def whole(self, whole: torch.Tensor) -> Any:
        """Distribute a tensor by giving all of it to each."""
        from torch.distributed import tensor as theirs

        return self.make(whole, [theirs.Replicate()] * self.mesh.ndim)

    def full(self, tensor: Any) -> Any:
        """Return the value of a result: a DTensor's whole tensor, the same on all ranks."""
        from torch.distributed._local_tensor import LocalTensor, maybe_disable_local_tensor_mode
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            tensor = tensor.detach().full_tensor()
        if isinstance(tensor, LocalTensor):
            first, *others = tensor._local_tensors.values()
            with maybe_disable_local_tensor_mode():
                alike = all(difference(other, first, self.exact) is None for other in others)
            assert alike, "the ranks have different results"
            return first
        return tensor

    def run(self, sample: Sample, way: Way) -> Run:
        """Run a call on all ranks; return the values of its results."""
        from torch.distributed._local_tensor import LocalTensorMode

        placements = iter(way)
        try:
            with LocalTensorMode(self.mesh.size()):
                results = sample.call(lambda full: self.make(full, next(placements)), self.whole)
                return Run([self.full(t) for t in results])
        except Exception as error:
            return Run(error=error)

    def is_refusal(self, error: BaseException) -> bool:
        """Tell whether an error says that the library does not do this."""
        text = str(error)
        said = ("sharding strategy", "in-place operations", "mixed torch.Tensor and DTensor")
        return isinstance(error, NotImplementedError) or any(one in text for one in said)


def theirs(tries: Sequence[tuple[Sample, Way]], sizes: Sequence[int]) -> Iterator[Result]:
    """Run calls on torch's DTensors."""
    import torch.distributed as torch_dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = torch.Size(sizes).numel()
    torch_dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    torch.autograd._enable_record_function(False)
    on = Theirs(sizes)
    for sample, way in tries:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            on.exact = sample.exact
            run = on.run(sample, way)
        yield judge(sample, way, [run], sizes, on.is_refusal)
    torch_dist.destroy_process_group()


def count(results: Iterable[Result], show: int) -> dict[str, int]:
    """Return the outcome of each operator: that of its worst call; print how calls failed."""
    found: dict[str, Counter[int]] = defaultdict(Counter)
    shown: Counter[tuple[str, int]] = Counter()
    for result in results:
        name = result.sample.name
        found[name][result.outcome] += 1
        shown[name, result.outcome] += 1
        if result.outcome > RIGHT and shown[name, result.outcome] <= show:
            print(str(result)[:500], flush=True)
    return {name: max(outcomes) for name, outcomes in found.items()}


def main() -> None:
    """Count, and print a table and the names of what is not right."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="operators; all where none is given")
    parser.add_argument("--torch", action="store_true", help="count for torch's DTensor too")
    parser.add_argument("--most", type=int, default=8, help="sample inputs of an operator")
    parser.add_argument(
        "--ways", type=int, default=12, help="ways to distribute a sample's tensors"
    )
    parser.add_argument("--mesh", default="4", help="sizes of the mesh, such as 2x2")
    parser.add_argument("--terms", action="store_true", help="Partial inputs too (not for torch's)")
    parser.add_argument("--show", type=int, default=0, help="failed calls to print of an operator")
    args = parser.parse_args()
    sizes = tuple(map(int, args.mesh.split("x")))
    samples = list(database(args.names or None, args.most))
    tries = [(s, way) for _, s in samples for way in ways(s, sizes, args.ways, args.terms)]
    print(f"{len({n for n, _ in samples})} operators, {len(tries)} calls, mesh {args.mesh}")
    counted: dict[str, dict[str, int]] = {}
    for who, run in (("dure", outcomes), *((("torch", theirs),) if args.torch else ())):
        began = time.perf_counter()
        counted[who] = count(run(tries, sizes), args.show)
        print(f"{who}: {time.perf_counter() - began:.0f} s", flush=True)
    print(f"\n{'':10}" + "".join(f"{one:>10}" for one in OUTCOMES) + f"{'right, %':>10}")
    for who, found in counted.items():
        total = Counter(found.values())
        share = 100 * total[RIGHT] / max(len(found), 1)
        row = "".join(f"{total[one]:>10}" for one in range(len(OUTCOMES)))
        print(f"{who:10}{row}{share:>10.1f}")
    for who, found in counted.items():
        for outcome in range(REFUSED, len(OUTCOMES)):
            names = [name for name, one in found.items() if one == outcome]
            if names:
                print(f"\n{who}, {OUTCOMES[outcome]}: {', '.join(names)}")


if __name__ == "__main__":
    main()
