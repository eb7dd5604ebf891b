"""Programs of torch.distributed.tensor: with Dure's imports, and beside an imported Dure."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import torch

from tests.parallel.torch_gloo import torch_group

PROGRAM = Path(__file__).parent / "programs" / "tensors.py"


def compare(rank: int, folder: str, changed: str) -> None:
    """Run the program in a world of torch's, and with changed imports in this one."""
    with torch_group(rank, 2, f"{folder}/torch"):
        expected = runpy.run_path(str(PROGRAM))["find"]()
    found = runpy.run_path(changed)["find"]()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_program_with_changed_imports_finds_what_torch_finds(process_pool, tmp_path):
    text = PROGRAM.read_text()
    changed = text.replace("import torch.distributed as dist", "import dure as dist")
    (tmp_path / "program.py").write_text(changed.replace("from torch.distributed.", "from dure."))
    process_pool(2).run(compare, str(tmp_path), str(tmp_path / "program.py"))


# --------------------------------------------------------------------------------------------------
# Stock programs of torch.distributed.tensor in a process that also imports Dure.


STOCK = '''
import importlib, json
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop",
              "SGD")  # all that run over DTensors of torch
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))


def functions():
    """What torch.optim has: functions and methods, by name."""
    found = {}
    for name in OPTIMIZERS:
        module = importlib.import_module(f"torch.optim.{name.lower()}".replace("adamw", "adam"))
        cls = getattr(torch.optim, name)
        found |= {f"{name}.{n}": f for c in cls.__mro__[:-1] for n, f in vars(c).items()}
        found |= {f"{module.__name__}.{n}": f for n, f in vars(module).items() if callable(f)}
    return found


def train():
    """The weights that each optimizer finds, and what the optimizer object itself has."""
    found = {}
    for name in OPTIMIZERS:
        full = torch.linspace(-1, 1, 12).reshape(4, 3)
        weight = torch.nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]))
        optimizer = getattr(torch.optim, name)([weight], lr=0.1)
        for step in range(3):
            (weight * weight).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name] = weight.full_tensor().tolist(), sorted(vars(optimizer))
    return found


for name in OPTIMIZERS:  # torch wraps each class's step when the first object is made
    getattr(torch.optim, name)([torch.nn.Parameter(torch.ones(1))])
before, trained = functions(), train()
import dure.tensor
import dure.fsdp

after = functions()
changed = [name for name, function in before.items() if after.get(name) is not function]
print(json.dumps({"changed": changed, "added": sorted({*after} - {*before}),
                  "same": train() == trained, "count": len(trained)}))
'''


def test_torch_s_own_dtensors_and_optimizers_are_the_same_before_and_after_dure_is_imported():
    run = subprocess.run([sys.executable, "-c", STOCK], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == (
        '{"changed": [], "added": [], "same": true, "count": 10}'
    )
