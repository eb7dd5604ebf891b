"""PyTorch-Ignite: a data parallel trainer and an evaluator whose metric covers all ranks.

dure run --stand-in-gloo --nproc 2 examples/clients/ignite_ddp.py
"""

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.metrics import MeanSquaredError


def main(local_rank: int) -> None:
    torch.manual_seed(0)
    model = idist.auto_model(torch.nn.Linear(8, 1))
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05))
    inputs = torch.randn(64, 8)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = idist.auto_dataloader(dataset, batch_size=16)  # of all ranks together

    def step(engine: Engine, batch: list[torch.Tensor]) -> float:
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(step)
    evaluator = Engine(lambda engine, batch: (model(batch[0]).detach(), batch[1]))
    MeanSquaredError().attach(evaluator, "error")
    losses, errors = [], []

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        losses.append(idist.all_reduce(engine.state.output) / idist.get_world_size())
        errors.append(evaluator.run(loader).metrics["error"])

    trainer.run(loader, max_epochs=3)
    if idist.get_rank() == 0:
        print("losses", *losses)
        print("errors", *errors)
        print("weights", sum(p.double().abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(main)
