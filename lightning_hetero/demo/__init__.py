"""Small, real training tasks that need no download (layer A): for the command line, examples and tests.

``digits``   ``DigitsData``, ``DigitsCNN``: 8x8 handwritten digits, about 21 thousand parameters; ``DigitsClients``:
             divided among the ranks.
``text``     ``TopicsText``, ``CharTransformer``: characters of Python's own help topics, a small GPT.
"""

from __future__ import annotations

from lightning_hetero.demo.digits import DigitsClients, DigitsCNN, DigitsData
from lightning_hetero.demo.text import CharTransformer, TopicsText

__all__ = ["CharTransformer", "DigitsCNN", "DigitsClients", "DigitsData", "TopicsText"]
