"""Methods that an optimizer has besides its step, called when all workers have met for that (layer T)."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from lightning_hetero.stale.runtime.serve.agreement import DisagreementError
from lightning_hetero.stale.runtime.serve.update import bits
from lightning_hetero.transport.base import Request

__all__ = ["call_own_method"]


def call_own_method(optimizers: Sequence[Optimizer], met: Request) -> bool:
    """Returns whether a meeting was for such a call, which may have changed parameters.

    Raises:
        DisagreementError: it has failed, or returned something.
    """
    for o in bits(met.steps):
        try:
            value = getattr(optimizers[o], met.text.partition("(")[0])()
        except Exception as error:
            raise DisagreementError(
                f"{met.text} failed in the parameter server: {type(error).__name__}: {error}"
            ) from error
        if value is not None:
            raise DisagreementError(
                f"{met.text} returns {value!r:.100}, which the ranks cannot have: it is called in the parameter server."
                " Use strategy='hetero_balanced'"
            )
    return met.steps != 0
