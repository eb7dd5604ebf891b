"""How a mesh is printed."""

# pyright: reportArgumentType=false

from dure.device_mesh import DeviceMesh


def test_a_mesh_prints_its_ranks_in_the_grid():
    mesh = DeviceMesh(
        "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"), _rank=2, _init_backend=False
    )
    assert str(mesh).splitlines() == [
        "DeviceMesh((dp=2, tp=2), 'cpu', stride=(2, 1))",
        "      tp 0  tp 1",
        "dp 0    0     1",
        "dp 1    2*    3",
    ]
    assert repr(mesh["dp"]) == "DeviceMesh((dp=2), 'cpu', stride=(2,))"
