"""How a user's loader becomes rank-local parts of agreed global batches (layer T).

``order``          which samples, in which order, make the global batches of an epoch: never depends on the shares
``samplers``       a user's own samplers: told the epoch, drawn under a seed
``batches``        cuts each global batch into one contiguous part per rank
``copies``         a user's DataLoader copied, with its batches from elsewhere
``loader``         puts those parts into the user's own DataLoader, workers, collate function and all
``stream``         the same for iterable datasets, by re-batching
``micro_batches``  a collated batch cut into micro-batches, and outputs joined again
``assigned``       batches of whatever positions of the order a server assigns
``partition``      one dataset divided among clients that differ
"""

from lightning_hetero.data.partition import partition_by_group, partition_by_labels

__all__ = ["partition_by_group", "partition_by_labels"]
