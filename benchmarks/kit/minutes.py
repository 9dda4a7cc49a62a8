"""How long each benchmark takes; changes nothing that is measured."""

MINUTES = {
    "balanced": 38, "stale": 35, "pipeline": 17, "joint": 20, "federated": 5, "sharded": 16, "auto": 11, "peers": 14,
    "planner": 11, "faults": 11,
}  # fmt: skip
"""The ten benchmarks in the order in which they are run, and what each one takes on two cores [minutes]."""
