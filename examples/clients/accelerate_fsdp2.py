"""Hugging Face Accelerate: fully sharded training (FSDP2) on the CPU, saved and resumed.

Accelerate 1.15 ignores its FSDP plug-in without a word if the devices are CPUs. Two lines that call
them GPUs let the program of a GPU machine run here, for a test.

dure run --stand-in-gloo --nproc 2 examples/clients/accelerate_fsdp2.py
"""

import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, set_seed

state = PartialState(cpu=True)
state.distributed_type = DistributedType.MULTI_GPU
set_seed(0)
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=64
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)
batches = torch.randn(6, accelerator.num_processes, 4, 8)


def train(steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = batches[step, accelerator.process_index]
        loss = torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())
    return losses


folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
first = train(range(3))
accelerator.save_state(folder[0])
second = train(range(3, 6))
accelerator.load_state(folder[0])
again = train(range(3, 6))
assert second == again, "the loaded state is the saved one"
accelerator.print("losses", *first, *second)
weights = [p.full_tensor().double().abs().sum().item() for p in model.parameters()]
accelerator.print("weights", sum(weights))
accelerator.end_training()
