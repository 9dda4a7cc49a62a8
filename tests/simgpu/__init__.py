"""Tests on simulated GPUs: see `tests.simgpu.sim` for what is simulated and what is not."""
