"""`dure.plan.memory`: what each rank of a mesh holds, and meshes that do not divide a model."""

import pytest

from dure.errors import UsageError
from dure.plan import Mesh, Model, Training, memory

LLAMA = Model.of_size(8e9)


def test_memory_of_each_rank_is_counted():
    found = memory(LLAMA, Mesh(pp=4, fsdp=2, tp=2), Training(microbatches=8))
    assert LLAMA.parameters == 8_030_261_248
    assert [rank.stages for rank in found] == [(range(i, i + 8),) for i in (0, 8, 16, 24)]
    held = [(rank.parameters / 2**30, rank.gradients / 2**30) for rank in found]
    ends, between = pytest.approx((2.11, 2.11), abs=0.005), pytest.approx((1.63, 1.63), abs=0.005)
    assert held == [ends, between, between, ends]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: Mesh.parse("pq=2"), "'pq=2'"),
        (lambda: Model.parse("width=64"), "a model needs a width and layers"),
        (lambda: memory(LLAMA, Mesh.parse("tp=16")), "tp divides the heads of keys: 8"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, said):
    with pytest.raises(UsageError) as caught:
        wrong()
    assert said in str(caught.value)
