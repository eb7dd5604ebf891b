"""A loop as in nanoGPT: stock DDP, gradient accumulation, clipping, autocast, a checkpoint.

torchrun --nproc-per-node 2 examples/clients/ddp_loop.py
dure run --stand-in-gloo --nproc 2 examples/clients/ddp_loop.py
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "gloo")
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WIDTH, WORDS, LENGTH, ACCUMULATION = 32, 48, 16, 2


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight  # tied
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.words(rows) + self.places(torch.arange(rows.shape[1]))
        logits = self.head(self.blocks(x, mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


torch.manual_seed(1337)
model = DistributedDataParallel(GPT())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
generator = torch.Generator().manual_seed(1337 + rank)
losses = []
for _ in range(4):
    for micro_step in range(ACCUMULATION):
        model.require_backward_grad_sync = micro_step == ACCUMULATION - 1
        rows = torch.randint(0, WORDS, (4, LENGTH + 1), generator=generator)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(rows[:, :-1], rows[:, 1:]) / ACCUMULATION
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    total = loss.detach() * ACCUMULATION
    dist.all_reduce(total, dist.ReduceOp.AVG)
    losses.append(total.item())

if rank == 0:
    file = os.path.join(tempfile.mkdtemp(), "ckpt.pt")
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = torch.load(file, weights_only=True)["model"]
    print("losses", *losses, "norm", norm.item())
    print("weights", sum(p.double().abs().sum().item() for p in saved.values() if p.numel() > 256))
dist.destroy_process_group()
