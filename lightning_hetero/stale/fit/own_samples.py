"""This rank's own finite stream as a source of what the server assigns: how many samples, not which (layer L)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from lightning_hetero.base.elastic.members import Members
from lightning_hetero.data.order import Channel
from lightning_hetero.data.own_stream import OwnStream, read_together
from lightning_hetero.data.stream import raise_unknown_place
from lightning_hetero.stale.decide.intervals import size
from lightning_hetero.stale.decide.streams import Stream, Streams


class OwnSamples(OwnStream):
    """As `SampleSource`, of streams; a push that counts nothing has its samples come again.

    Args:
        loader: the user's; not changed.
        channel: of all ranks.
        members: who takes part.
        batch_of_all: samples of a global batch.
        counted: whether the user says what a batch counts.
        used: by the global step at which an epoch is resumed, what was used of the stream of each rank.

    Attributes:
        batch_of_all: as given.
        ahead: as there.
    """

    ahead = 0

    def __init__(
        self, loader: DataLoader, channel: Channel, members: Members, *, batch_of_all: int, counted: bool,
        used: Mapping[int, Sequence[int]],
    ) -> None:  # fmt: skip
        reserve = Streams.reserve(batch_of_all, drop_last=loader.drop_last)
        super().__init__(loader, reserve=reserve, counted=counted)
        self._channel, self._members, self.batch_of_all, self._used = channel, members, batch_of_all, used

    def begin_epoch(self, first: int, most: int) -> list[int]:
        """Begins an epoch at a global step; returns what all ranks have read, see `Streams.numbers`. A collective.

        Raises:
            ValueError: it is not known what was used before ``first``.
            RuntimeError: another rank's stream fails.
        """
        rank = self._members.rank
        used = self._used.get(first) if first else [0] * self._members.world_size
        if used is None:
            raise_unknown_place(first)

        def begin() -> tuple[int, int, bool]:
            self.begin(used[rank])
            return rank, self.read, self.through

        told = read_together(rank, self._channel.all_gather_object, begin)
        streams = [Stream(other, read, through, used[other]) for other, read, through in told]
        if any(stream.read == stream.used for stream in streams):  # perhaps it has never had one for its dummy
            self.share_dummy(self._channel.all_gather_object)
        return Streams.numbers(
            self.batch_of_all, most, drop_last=self.loader.drop_last, first=first, streams=streams
        )

    @property
    def told(self) -> tuple[int, int]:
        """What claims and pushes say."""
        return self.read, int(self.through)

    def batch(self, spans: Sequence[tuple[int, int]], *, due: int = 1) -> Any:
        """Returns the collated batch of the next samples, as many as are assigned."""
        del due
        return self.next(size(spans))

    def dummy(self, samples: int = 1, *, due: int = 0) -> Any:
        del due
        return super().dummy(samples)

    def hint(self, span: tuple[int, int]) -> None:
        """Nothing is fetched ahead by position."""
