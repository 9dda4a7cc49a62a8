"""Command line (layer A): nothing in the package imports it.

``train``    ``lightning-hetero-train``: compose a configuration, train, write ``result.json``, print tables.
``jobs``     what makes several jobs in one process safe, each with its own ranks.
``summary``  events and results to rows and plain-text tables; pure functions.
"""

from __future__ import annotations

__all__: list[str] = []
