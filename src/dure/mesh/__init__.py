"""Device meshes: the job's ranks as an array, with a process group along each axis.

Internal: its public names are those of `dure.device_mesh`.
"""

from __future__ import annotations

from dure.mesh.device_mesh import DeviceMesh, current_mesh, init_device_mesh

__all__ = ["DeviceMesh", "current_mesh", "init_device_mesh"]
