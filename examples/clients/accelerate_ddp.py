"""Hugging Face Accelerate: a data parallel loop, gradient accumulation, results of all ranks.

dure run --stand-in-gloo --nproc 2 examples/clients/accelerate_ddp.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
inputs = torch.randn(50, 8)  # the last batch is not full
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

losses = []
for _ in range(2):
    for batch, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), reduction="mean").item())

predictions = accelerator.gather_for_metrics([model(batch).detach() for batch, _ in loader][-1])
accelerator.print("losses", *losses)
accelerator.print("last predictions", *predictions.flatten().tolist())
accelerator.print("weights", sum(p.double().abs().sum().item() for p in model.parameters()))
accelerator.end_training()
