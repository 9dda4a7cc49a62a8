"""What processes of the tests need: imported once, in a process from which all others are forked.

Nothing of it is garbage, and nobody's collections need to look at it: a full one takes 10 ms instead of 150 ms.
"""

import gc

gc.disable()  # makes the imports themselves a fifth faster

import hypothesis  # noqa: F401, E402
import psutil  # noqa: F401, E402
import pytest  # noqa: F401, E402

import lightning_hetero.public  # noqa: F401, E402
from tests.installed import read_once  # noqa: E402

read_once()

gc.collect()
gc.freeze()
gc.enable()
