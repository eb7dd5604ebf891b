"""Ray Train: two workers of a `TorchTrainer`, whose group is Dure's.

python examples/clients/ray_train.py dure
"""

import os
import sys
import tempfile

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
import torch
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model


def learn(config: dict) -> list:
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rank = train.get_context().get_world_rank()
    for batch in torch.randn(4, 2, 6, 8)[:, rank]:
        loss = torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loss = loss.detach()
    torch.distributed.all_reduce(loss)
    weights = sum(p.double().abs().sum().item() for p in model.parameters())
    train.report({"loss": loss.item()})
    assert torch.distributed.get_backend() == config["backend"]
    return ["loss", loss.item(), "weights", weights]


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    backend = sys.argv[1] if len(sys.argv) > 1 else "gloo"
    trainer = TorchTrainer(
        learn,
        train_loop_config={"backend": backend},
        torch_config=TorchConfig(backend=backend),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=tempfile.mkdtemp()),
    )
    print(*trainer.fit().return_value)
    ray.shutdown()
