"""How long each benchmark takes; changes nothing that is measured."""

MINUTES = {
    "balanced": 37, "stale": 32, "pipeline": 17, "joint": 21, "federated": 5, "sharded": 15, "auto": 10, "peers": 14,
    "planner": 11, "faults": 11,
}  # fmt: skip
"""The ten benchmarks in the order in which they are run, and what each one takes on two cores [minutes]."""
