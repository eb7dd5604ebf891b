"""Lightning's Trainer: DDP and FSDP2 with validation; ints and floats logged with `sync_dist=True`.

dure run --nproc 2 examples/clients/lightning_trainer.py dure
"""

import sys
import tempfile
import warnings

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore", ".*num_workers|.*fewer|.*logger", module="lightning")
BACKEND = sys.argv[1] if len(sys.argv) > 1 else "gloo"


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(8, 2)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss of validation", loss, sync_dist=True)
        self.log("rows", len(batch[0]), sync_dist=True, reduce_fx="sum")  # an int
        self.log("mean of ranks", self.global_rank, sync_dist=True)  # an int, averaged

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


inputs = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
dataset = TensorDataset(inputs, inputs[:, :2] - inputs[:, 2:4])
for strategy in (
    DDPStrategy(process_group_backend=BACKEND),
    ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend=BACKEND
    ),
):
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=2,
        default_root_dir=tempfile.mkdtemp(),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    module = Regression()
    loader = DataLoader(dataset, batch_size=6)
    trainer.fit(module, loader, DataLoader(dataset, batch_size=6))
    weights = sum(full(p).double().abs().sum().item() for p in module.parameters())
    if trainer.is_global_zero:
        print(type(strategy).__name__, "weights", weights)
        for name, value in sorted(trainer.callback_metrics.items()):
            print(name, value.item())
torch.distributed.destroy_process_group()
