"""Random numbers of replicas."""

import torch
from torch import nn

from tests.parallel.dp.wrapped import parallel


class Random(nn.Module):
    """Draws in all the ways that follow the thread."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.drop2 = nn.Dropout(0.5), nn.Dropout2d(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape) + torch.randn_like(x) + torch.empty_like(x).uniform_()
        return torch.stack([self.drop(x), self.drop2(x), noise + torch.rand_like(x)], dim=1)


def test_random_numbers_depend_on_the_seed_and_not_on_the_threads_timing() -> None:
    model = parallel(Random(), 4)
    x = torch.ones(8, 16, 3, 3)
    torch.manual_seed(5)
    first = model(x)
    for _ in range(3):
        torch.manual_seed(5)
        assert torch.equal(model(x), first)
    assert not torch.equal(model(x), first)
    parts = first.chunk(4)
    assert not any(torch.equal(parts[0], p) for p in parts[1:])
    dropped, channels = first[:, 0], first[:, 1]
    assert set(dropped.unique().tolist()) == set(channels.unique().tolist()) == {0.0, 2.0}
    assert 0.4 < float((dropped == 0).float().mean()) < 0.6
    assert torch.equal(channels.amin((2, 3)), channels.amax((2, 3)))  # whole channels
    model.eval()
    assert torch.equal(model(x)[:, 0], x)
