"""Device meshes, under torch's path: `from dure.device_mesh import init_device_mesh`."""

from __future__ import annotations

from dure.mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
