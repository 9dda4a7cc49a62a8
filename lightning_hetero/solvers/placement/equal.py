"""Which sets and orders of devices are equal: what is planned of one holds for all others.

Devices are equal by speed and memory, links by latency and bandwidth, to the last bit: so plans are the same as if each
set had been planned.
"""

from __future__ import annotations

import numpy as np

from lightning_hetero.solvers.chain.layers import Floats

__all__ = ["Equal"]


class Equal:
    """Keys of devices that may take each other's place.

    Args:
        speeds, caps: by device.
        latency_s, bandwidth: of links, by source and target.
    """

    def __init__(self, speeds: Floats, caps: Floats, latency_s: Floats, bandwidth: Floats) -> None:
        self._devices, self._links = (speeds, caps), (latency_s, bandwidth)
        self._chains: dict[tuple[int, ...], bytes] = {}

    def chain(self, ranks: tuple[int, ...]) -> bytes:
        """Returns what pipelines have in common whose devices and links are equal position by position."""
        found = self._chains.get(ranks)
        if found is None:
            r = np.array(ranks)
            rows = [values[r] for values in self._devices]
            if len(ranks) > 1:
                after = np.roll(r, -1)
                rows += [values[a, b] for values in self._links for a, b in ((r, after), (after, r))]
            found = self._chains[ranks] = np.array(rows).tobytes()
        return found

    def among(self, ranks: tuple[int, ...]) -> bytes:
        """Returns what devices have in common that are equal one by one, and the links between any two of them."""
        r = np.array(ranks)
        rows = [values[r] for values in self._devices]
        if len(ranks) > 1:
            rows += [values[np.ix_(r, r)].ravel() for values in self._links]
        return np.concatenate(rows).tobytes()
