"""The codecs by their documented path, e.g. ``lightning_hetero.stale.compress.TopK``; see ``runtime/memory``."""

from lightning_hetero.stale.runtime.memory.codecs import Cast, Codec, TopK, by_name

__all__ = ["Cast", "Codec", "TopK", "by_name"]
