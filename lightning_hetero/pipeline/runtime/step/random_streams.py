"""Separate random streams for each micro-batch and layer: what they draw depends on no plan (layer T).

    stream_seed(seed of the run, step, number of the micro-batch) ─► the body's streams, up to the backbone's call
                                                   │             └─► stream_seed(., calls so far): behind a call
                                                   └─► layer_seed(., index): a layer's
"""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import torch

from lightning_hetero.measure.device import device_in_use


def stream_seed(seed: int, *numbers: int) -> int:
    """Returns the seed of an independent random stream, e.g. of one micro-batch's.

    The same numbers give the same stream on any machine, in any order of execution and under any plan. (A sum such as
    ``seed + step`` would not do: streams of neighbouring steps would coincide with those of neighbouring seeds.)

    Args:
        seed: of the run; any integer.
        numbers: what tells streams apart, e.g. global step and number of the micro-batch in the global batch.

    Returns:
        An integer in [0, 2**63), which all of torch's generators accept.

    >>> stream_seed(0, 12, 3) == stream_seed(0, 12, 3), stream_seed(0, 12, 3) == stream_seed(0, 3, 12)
    (True, False)
    """
    words = [word & 0xFFFF_FFFF_FFFF_FFFF for word in (seed, *numbers)]
    packed = struct.pack(f"<{len(words)}Q", *words)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def layer_seed(seed: int, index: int) -> int:
    """Returns the seed of a layer's random stream for the micro-batch that has ``seed``.

    The output function of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014), at
    half the time of `stream_seed`: that counts once per layer and micro-batch.

    Args:
        seed: from `stream_seed`.
        index: of the layer.

    >>> len({layer_seed(seed, index) for seed in range(50) for index in range(50)})
    2500
    """
    mixed = (seed + (index + 1) * 0x9E3779B97F4A7C15) & 0xFFFF_FFFF_FFFF_FFFF
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFF_FFFF_FFFF_FFFF
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & 0xFFFF_FFFF_FFFF_FFFF
    return (mixed ^ mixed >> 31) >> 1


def seed_streams(seed: int) -> None:
    """Seeds torch's CPU generator, an accelerator's that is in use, and the global streams of `random` and of NumPy.

    ``torch.manual_seed`` would seed those of all devices and look for other backends (0.2 ms).
    """
    torch.default_generator.manual_seed(seed)
    device_in_use().seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)  # noqa: NPY002 (the global stream is what users draw from)
