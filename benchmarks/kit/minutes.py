"""How long each benchmark takes; changes nothing that is measured."""

MINUTES = {
    "balanced": 64, "stale": 58, "pipeline": 28, "joint": 26, "federated": 9, "sharded": 21, "auto": 12, "peers": 35,
    "planner": 19, "faults": 15,
}  # fmt: skip
"""The ten benchmarks in the order in which they are run, and what each one takes on two cores [minutes]."""
