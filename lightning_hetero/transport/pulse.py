"""Signs of life from a worker whose batch takes long (layer T)."""

from __future__ import annotations

import threading

from lightning_hetero.transport.link import WorkerLink

_END_S = 1.0  # a sign waits for nobody


class Pulse:
    """Gives signs of life on a link until `stop`: a long batch is no death, a stopped process is.

    Args:
        link: open; may be used by its own thread meanwhile.
        every_s: time between two signs [s].
    """

    def __init__(self, link: WorkerLink, every_s: float) -> None:
        self._link, self._every_s = link, every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name=f"pulse-{link.rank}", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._over.wait(self._every_s):
            self._link.sign_of_life()

    def stop(self) -> None:
        """Ends the link, and the thread with it; idempotent."""
        self._over.set()
        self._link.close()
        self._thread.join(_END_S)
