"""Lines of code and commands for a layout."""

from dure.plan import Job, Layout, Machine, Model, find_gpu
from dure.plan.advice import code, command


def test_lines_of_code_are_those_of_the_layout():
    job = Job(Model(32_000, 1024, 8, 16, 4, 4096, 2048), 16 * 2048)
    layout = Layout.parse("hsdp=4,tp=2,pp=2,mb=1,recompute=full", job)
    machine = Machine(find_gpu("h100"), 4, 4)
    lines = code(layout, job, machine)
    assert "(2, 2, 2, 2), mesh_dim_names=('pp', 'dp', 'fsdp', 'tp')" in lines
    for word in ("parallelize_module", "checkpoint", "fully_shard(model", "Schedule1F1B(stage, 4"):
        assert word in lines
    assert command(machine).startswith("dure run --nnodes 4 --nproc-per-node 4 --rdzv-endpoint ")
