"""Which layouts there are, and their text."""

import pytest

from dure.plan import Job, Layout, Machine, Model, find_gpu
from dure.plan.layouts import layouts

SMALL = Job(Model(32_000, 1024, 8, 16, 4, 4096, 2048), 16 * 2048)


def test_layouts_divide_heads_layers_sequences_and_nodes():
    machine = Machine(find_gpu("h100"), 2, 4)
    found = layouts(SMALL, machine)
    assert len(set(map(str, found))) == len(found)
    for each in found:
        assert each.ranks == 8
        assert 4 % each.tp == 0  # heads of keys, and a node
        assert each.pp <= 8 and 8 % (each.dp * each.tp * each.cp) == 0
        assert each.dp * each.microbatch * each.microbatches == 16
        assert each.pp == 1 or each.microbatches >= each.pp
        assert (each.strategy == "hsdp") <= (each.dp * each.cp > 4 // (each.tp * each.cp))
    strategies = {each.strategy for each in found if each.dp == 8}
    assert strategies == {"ddp", "zero1", "zero2", "fsdp", "hsdp"}
    assert {each.recompute for each in found} == {"none", "selective", "full"}
    assert {each.schedule for each in found if each.pp > 1} == {"1f1b", "interleaved-1f1b"}


@pytest.mark.parametrize(
    "text",
    ["fsdp=4,tp=2,mb=2", "ddp=2,pp=4,interleaved=2,mb=1,recompute=full", "zero1,cp=2,pp=4,mb=2"],
)
def test_a_layout_is_read_as_it_is_written(text):
    found = Layout.parse(text, SMALL)
    assert str(found) == text
    assert found.microbatches == 16 // (found.dp * found.microbatch)
