"""How a user's loader becomes rank-local parts of agreed global batches (layer T).

``order``    which samples, in which order, make the global batches of an epoch: never depends on the shares
``batches``  cuts each global batch into one contiguous part per rank
``loader``   puts that into the user's own DataLoader, workers, collate function and all
``stream``   the same for iterable datasets, by re-batching
``micro_batches``  a collated batch cut into micro-batches, and outputs joined again
``ticks``    batches made of whatever positions of the order a server grants, for the engine without shares
"""

from lightning_hetero.data.batches import GlobalBatchSampler, Part
from lightning_hetero.data.loader import LoaderSpec, inspect_loader, rebatched_loader
from lightning_hetero.data.order import (
    Channel,
    ContinuedOrder,
    EpochOrder,
    PooledBatches,
    PooledRanks,
    SamplerOrder,
    ShuffledOrder,
)
from lightning_hetero.data.stream import rebatched_stream

__all__ = [
    "Channel",
    "ContinuedOrder",
    "EpochOrder",
    "GlobalBatchSampler",
    "LoaderSpec",
    "Part",
    "PooledBatches",
    "PooledRanks",
    "SamplerOrder",
    "ShuffledOrder",
    "inspect_loader",
    "rebatched_loader",
    "rebatched_stream",
]
