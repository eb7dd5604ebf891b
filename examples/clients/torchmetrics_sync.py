"""torchmetrics: metrics that cover all ranks, at `compute` and at each step.

dure run --nproc 2 examples/clients/torchmetrics_sync.py dure
"""

import sys

import torch
import torch.distributed as dist
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix
from torchmetrics.regression import PearsonCorrCoef

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(0)
metrics = MetricCollection(
    MulticlassAccuracy(num_classes=3, dist_sync_on_step=True), MulticlassConfusionMatrix(3)
)
correlation, mean, values = PearsonCorrCoef(), MeanMetric(), CatMetric()
steps = []
for _ in range(4):
    scores = torch.randn(2, 10, 3, generator=generator)[rank]
    labels = torch.randint(0, 3, (2, 10), generator=generator)[rank]
    steps.append(metrics(scores, labels)["MulticlassAccuracy"].item())
    correlation.update(scores[:, 0], scores[:, 1])
    mean.update(scores, weight=rank + 1.0)
values.update(torch.arange(rank + 1.0))  # states of different lengths
results = metrics.compute()  # all ranks call, and get the same
of_all = [metric.compute() for metric in (correlation, mean, values)]
if rank == 0:
    print("accuracy of steps", *steps)
    print("accuracy", results["MulticlassAccuracy"].item())
    print("confusion", *results["MulticlassConfusionMatrix"].flatten().tolist())
    print("correlation", of_all[0].item(), "mean", of_all[1].item(), "values", *of_all[2].tolist())
dist.destroy_process_group()
