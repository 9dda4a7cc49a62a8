"""Every private name of Lightning and torchmetrics we need, in one place (layer L).

``loaders``        the loaders of a fit, how Lightning would change them, and the loops' counters: where a fit stands
``results``        values logged and metrics updated: what counts in them
``logs``           ``self.log`` diverted and made again, metrics combined over some of the ranks, throughput of all
``norms``          norms of gradients that torch and Lightning are asked for
``batches``        what the loop does with one batch, also with one that is None, and the callbacks it calls
``launchers``      launchers that let a run go on without a process that was killed; import them from there
``patches``        an attribute of an instance replaced for a while; the same

Each function says what it reads, why no public way exists, and which test pins it to the installed versions
(`tests/ranks/lightning_compat`). Verified with Lightning 2.6. Names without an underscore are read from here.
"""

from lightning_hetero.lightning_compat.batches import *
from lightning_hetero.lightning_compat.loaders import *
from lightning_hetero.lightning_compat.logs import *
from lightning_hetero.lightning_compat.patches import *
from lightning_hetero.lightning_compat.results import *
