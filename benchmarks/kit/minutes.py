"""What each benchmark may take of an evening; changes nothing that is measured."""

MINUTES = {
    "balanced": 36, "stale": 32, "pipeline": 18, "joint": 18, "federated": 8, "sharded": 12, "auto": 10, "peers": 22,
    "planner": 14, "faults": 10,
}  # fmt: skip
"""The ten benchmarks in the order of an evening, and each one's share of it on two cores [minutes]."""
