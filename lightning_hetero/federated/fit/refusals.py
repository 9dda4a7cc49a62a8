"""What cannot work where ranks train apart, refused with the reason and a way out (layer L)."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_hetero.base.refusals import Refusals
from lightning_hetero.federated.decide.rounds import Client

__all__ = ["REFUSALS", "check_clients"]

REFUSALS = Refusals(
    no_wrapper="there is no DistributedDataParallel: ranks train apart, and their parameters are averaged",
    comm_hooks="communication hooks change DDP's all-reduce, and there is none here: ranks exchange parameters once in"
    " local_steps steps; drop them, or use strategy='hetero_balanced'",
    lbfgs="LBFGS keeps a history of steps and directions, which has no average over ranks; use another optimizer, or"
    " one device",
    sync_batch_norm="SyncBatchNorm makes every rank wait for all others in every local step; use BatchNorm (its running"
    " statistics are averaged with the parameters), GroupNorm, or strategy='hetero_balanced'",
    zero="ZeroRedundancyOptimizer divides the optimizer's state among the ranks, which step together; here each makes"
    " local steps of its own. Use the optimizer that it wraps",
)


def check_clients(clients: Sequence[Client], *, automatic: bool, rests: bool) -> None:
    """Refuses data that a round cannot be made of.

    Args:
        clients: what all ranks train on.
        automatic: whether Lightning steps the optimizers.
        rests: whether ranks rest by the policy or by partial participation.

    Raises:
        ValueError: a rank has no batch, or has to leave out steps that only user code can count.
    """
    empty = [rank for rank, client in enumerate(clients) if not client.batches]
    if empty:
        raise ValueError(
            f"rank(s) {', '.join(map(str, empty))} have no batch of training data (samples per rank:"
            f" {[client.samples for client in clients]}): start only ranks that have data; with drop_last=True a"
            " loader with fewer samples than its batch_size has none"
        )
    if rests and not automatic:
        raise ValueError(
            "with manual optimization no rank can rest, because only user code counts its steps: here ranks rest (by"
            " policy='adaptive_steps', by participation < 1, or because data of different lengths are through at"
            " different times). Use policy='lb-bsp' or FedAvg(again=True), in which all ranks make all steps"
        )
