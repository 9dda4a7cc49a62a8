"""What a forked DataLoader worker must leave alone: what its parent does not need any more (layer T).

A process group that is garbage is destroyed by whoever collects it first. In a forked child torch's destructor waits
without end for threads that were not forked, or ends the process: "DataLoader worker exited unexpectedly". Torch and
Lightning leave such garbage behind, of stock DDP, too. A child that never looks at what it has inherited does neither
of the two, and shares more of its parent's memory.
"""

from __future__ import annotations

import gc
import os

_spared = False


def spare_inherited() -> None:
    """From now on children that this process forks never collect what they inherit; idempotent, and not undone.

    What is garbage when a fit has ended stays garbage, and the next worker may be forked by another loader.
    """
    global _spared
    if not _spared and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=gc.freeze)
        _spared = True
