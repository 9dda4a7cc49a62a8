"""The speed of this device when the same work last ran on it, so that a fit begins with good shares (layer L).

One file per device, in the folder that the variable ``LIGHTNING_HETERO_CACHE`` names, or else in
``~/.cache/lightning_hetero``. It holds the predictor's state of the latest kinds of work. Where it cannot be written
no file is kept and a fit begins with equal shares, as it does where one device of the cluster is not known.
"""

from __future__ import annotations

import json
import math
import os
import socket
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_hetero import lightning_compat as compat
from lightning_hetero.callbacks.throttle import ThrottleCallback
from lightning_hetero.measure.device import HostDevice
from lightning_hetero.record.files import write_file
from lightning_hetero.shares.policy import Learned

_MOST = 64  # kinds of work per device
_LEAST = 5  # steps that a speed must rest on


class EarlierRuns:
    """What earlier runs have learned of this device, for the kind of work that a fit is.

    Two fits are of one kind if their modules have the same class and size, at the same precision, on as many devices.

    Args:
        trainer: of the fit; the ranks' devices are known.
        device: of this rank.
        counts: whether speeds are read and kept at all.

    Attributes:
        most: the most samples of this rank's part that the run of a checkpoint has found to fit; None: it has not.
    """

    def __init__(self, trainer: Trainer, device: HostDevice, *, counts: bool) -> None:
        self.most: int | None = None
        self._trainer, self._counts = trainer, counts
        name = device.identity() or f"{device.name()}-{trainer.local_rank}"
        folder = os.path.expanduser(os.environ.get("LIGHTNING_HETERO_CACHE") or "~/.cache/lightning_hetero")
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in f"{socket.gethostname()}-{name}")
        self._path = Path(os.devnull if folder.startswith("~") else folder) / f"{safe}.json"  # ~: there is no home

    @cached_property
    def _work(self) -> str:
        """Asked for once the module is set up: before that it may have no layers, or lazy ones."""
        trainer, module = self._trainer, self._trainer.lightning_module
        emulated = [repr(c.scenario) for c in compat.trainer_callbacks(trainer) if isinstance(c, ThrottleCallback)]
        size = sum(p.numel() for p in module.parameters())
        work = type(module).__module__, type(module).__qualname__, size, trainer.precision, trainer.world_size
        return json.dumps([*work, *emulated])

    def _all(self) -> dict[str, Any]:
        with suppress(OSError, TypeError, ValueError):
            return dict(json.loads(self._path.read_text(encoding="utf-8")))
        return {}

    def read(self) -> Learned | None:
        """Returns what was learned last from this kind of work; None: nothing, or nothing that can be used."""
        with suppress(AttributeError, KeyError, TypeError, ValueError):
            predictor, state, guard = (self._all() if self._counts else {})[self._work]
            numbers = [x for value in state.values() for x in (value if isinstance(value, list) else [value])]
            if all(map(math.isfinite, [*numbers, *guard.values()])):
                return predictor, state, guard
        return None

    def write(self, learned: Learned | None) -> None:
        """Keeps what was learned, if it rests on enough steps."""
        if learned is None or not self._counts or learned[1].get("updates", 0) < _LEAST:
            return
        others = [(work, one) for work, one in self._all().items() if work != self._work]
        write_file(self._path, json.dumps(dict([*others[1 - _MOST :], (self._work, learned)])), told=False)
