"""How a user's loader becomes rank-local parts of agreed global batches (layer T).

``order``          which samples, in which order, make the global batches of an epoch: never depends on the shares
``samplers``       a user's own samplers: told the epoch, drawn under a seed
``batches``        cuts each global batch into one contiguous part per rank
``costs``          parts that cost alike, where samples' costs are known
``copies``         a user's DataLoader copied, with its batches from elsewhere
``loader``         puts those parts into the user's own DataLoader, workers, collate function and all
``stream``         the same for iterable datasets, by re-batching
``micro_batches``  a collated batch cut into micro-batches, and outputs joined again
``assigned``       batches of whatever positions of the order a server assigns
``partition``      one dataset divided among clients that are not alike
"""

from lightning_hetero.data.batches import GlobalBatchSampler, Part, Split
from lightning_hetero.data.loader import IndivisibleError, LoaderSpec, inspect_loader, rebatched_loader
from lightning_hetero.data.order import (
    Channel,
    ContinuedOrder,
    EpochOrder,
    SamplerOrder,
    ShuffledOrder,
)
from lightning_hetero.data.partition import partition_by_group, partition_by_labels
from lightning_hetero.data.pooled import PooledBatches, PooledRanks
from lightning_hetero.data.stream import RebatchedStream

__all__ = [
    "Channel",
    "ContinuedOrder",
    "EpochOrder",
    "GlobalBatchSampler",
    "IndivisibleError",
    "LoaderSpec",
    "Part",
    "PooledBatches",
    "PooledRanks",
    "RebatchedStream",
    "SamplerOrder",
    "ShuffledOrder",
    "Split",
    "inspect_loader",
    "partition_by_group",
    "partition_by_labels",
    "rebatched_loader",
]
