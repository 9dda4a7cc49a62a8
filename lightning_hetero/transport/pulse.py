"""Signs of life of a worker, from a thread of their own: a long batch is no death, a stopped process is (layer T)."""

from __future__ import annotations

import threading

from lightning_hetero.transport.base import WorkerLink

__all__ = ["Pulse"]


class Pulse:
    """Gives signs of life on a link until `stop`.

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
            self._link.sign_of_life(self._every_s)

    def stop(self) -> None:
        """Ends the link, and the thread with it; idempotent."""
        self._over.set()
        self._link.close()
        self._thread.join()
