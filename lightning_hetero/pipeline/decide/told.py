"""What every rank tells all others of a batch: as many numbers whatever happened, for one sum over ranks (layer P)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.controller.messages import LinkTime
from lightning_hetero.types import GroupPlan

__all__ = ["Told", "telling_layers"]

# Numbers: samples, own work, waiting until the exchange begins, the exchange of the batch before; `rest_s`.
_WORK = 5
_WAYS, _WAY = 2, 4  # neighbours that a rank receives from, at most; numbers of each: source, messages, bytes, seconds


def telling_layers(batch: int, groups: Sequence[GroupPlan]) -> int:
    """Returns which group's ranks tell of their layers in a batch: all have the same layers, and take turns."""
    return batch % len(groups)


@dataclass(frozen=True, slots=True)
class Told:
    """One rank's numbers, or the sum of all ranks', which has those of each.

    Attributes:
        world: ranks.
        layers: of the backbone; 0: links and layers are not told of, because nobody asks.
        numbers: `size` of them.
    """

    world: int
    layers: int
    numbers: Sequence[float]

    @staticmethod
    def size(world: int, layers: int) -> int:
        """Returns how many numbers it takes."""
        return _WORK * world + (_WAYS * _WAY * world + layers if layers else 0)

    @classmethod
    def by(
        cls,
        rank: int,
        world: int,
        layers: int,
        work: tuple[float, float, float, float],
        *,
        rest_s: float = 0.0,
        links: Sequence[LinkTime] = (),
        first_layer: int = 0,
        layer_s: Sequence[float] = (),
    ) -> Told:
        """Returns what one rank has to tell.

        Args:
            rank, world, layers: who tells, and see above.
            work: samples; own work [s]; waiting for others until this message was sent, which is when the sums of the
                gradients have begun [s]; what followed in the batch before, until these and the message were there [s].
            rest_s: of a rank at rest: what a computation that is always the same took [s].
            links: on which it has received; of more than two neighbours the first two.
            first_layer, layer_s: of its layers, in order [s]; none if it is not its group's turn.
        """
        numbers = [0.0] * cls.size(world, layers)
        numbers[_WORK * rank : _WORK * (rank + 1)] = *work, rest_s
        if layers:
            at = _WORK * world + _WAYS * _WAY * rank
            for link in links[:_WAYS]:
                numbers[at : at + _WAY] = float(link.source), float(link.messages), link.size_bytes, link.seconds
                at += _WAY
            begin = len(numbers) - layers + first_layer
            numbers[begin : begin + len(layer_s)] = layer_s
        return cls(world, layers, numbers)

    @property
    def work(self) -> list[tuple[int, float, float]]:
        """By rank: samples, own work [s], the rest of the batch [s].

        The batch ends for all together. When the last one has sent its message the exchange alone is left: what it took
        in the batch before, where it took who came last the least time.
        """
        rows = [self.numbers[_WORK * r : _WORK * (r + 1)] for r in range(self.world)]
        batch_s = max(row[1] + row[2] for row in rows) + min(row[3] for row in rows)
        return [(round(samples), compute_s, batch_s - compute_s) for samples, compute_s, *_ in rows]

    @property
    def rest_s(self) -> dict[int, float]:
        """By rank at rest that has looked: what a computation that is always the same took [s]."""
        found = {rank: self.numbers[_WORK * (rank + 1) - 1] for rank in range(self.world)}
        return {rank: rest_s for rank, rest_s in found.items() if rest_s > 0.0}

    @property
    def links(self) -> list[LinkTime]:
        """What was timed of messages between ranks."""
        found: list[LinkTime] = []
        for way in range(_WAYS * self.world if self.layers else 0):
            at = _WORK * self.world + _WAY * way
            source, messages, size_bytes, seconds = self.numbers[at : at + _WAY]
            if messages > 0:
                found.append(
                    LinkTime(
                        source=round(source),
                        target=way // _WAYS,
                        messages=round(messages),
                        size_bytes=size_bytes,
                        seconds=seconds,
                    )
                )
        return found

    def layer_s(self, group: GroupPlan) -> dict[int, list[float]]:
        """Returns by rank what its layers took [s], of a group that told of them; ranks that did not are left out."""
        found: dict[int, list[float]] = {}
        if self.layers:
            layers = list(self.numbers[-self.layers :])
            for stage, rank in enumerate(group.ranks):
                own = layers[group.cuts[stage] : group.cuts[stage + 1]]
                if min(own) > 0.0:
                    found[rank] = own
        return found
