"""Rules of the literature as policies that users could have written: on the public interface, a page each.

All keep the contract of `tests/pure/stale/test_policy_contract.py`, as the engine's own do.
"""

from __future__ import annotations

from benchmarks.stale.policies.buffered import Buffered
from benchmarks.stale.policies.drop import Drop
from benchmarks.stale.policies.dynsgd import DelayAdaptive, DynSgd
from benchmarks.stale.policies.late import Aged, Joining
from benchmarks.stale.policies.quorum import Backup, Quorum
from lightning_hetero.stale.policy import Policy

__all__ = ["WRITTEN", "Aged", "Backup", "Buffered", "DelayAdaptive", "Drop", "DynSgd", "Joining", "Quorum"]

WRITTEN: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Aged, Joining, Buffered, Drop, DynSgd, DelayAdaptive, Quorum, Backup)
}
