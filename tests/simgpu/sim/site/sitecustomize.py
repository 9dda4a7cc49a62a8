"""Python imports this at its start if its folder is on PYTHONPATH: see `tests.simgpu.sim.on_import`."""

from tests.simgpu.sim.on_import import arm

arm()
