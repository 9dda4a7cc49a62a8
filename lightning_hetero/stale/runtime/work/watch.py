"""Notices what a rank changes in its copy of the model other than by a push (layer T).

    in place, or another tensor in its stead    torch counts the version of a tensor: cheap, and nothing is missed
    through ``.data``                           not counted: a few numbers of each parameter are compared

What is written and looks the same may have been changed and put back, or changed in few places. From then on such a
parameter is kept as it came, to be compared as a whole. So what is not noticed is a change through ``.data`` of a few
numbers among many, and the first change of that kind that others' updates overtake.

On a device the numbers are compared where they are, and it is not waited for: what is found is noted, and is read when
the host waits for the device anyway, at the next push.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lightning_hetero.measure.device import device_of
from lightning_hetero.stale.runtime.layout import FlatLayout

_SAMPLES, _WORD_BYTES = 1024, 4  # words that are compared, of all parameters together
_OTHER = -1  # no tensor's version


class ParameterPlace(NamedTuple):
    """Where a module keeps a parameter or buffer, in whose stead its user may put another one."""

    name: str
    tensor: Tensor
    held: dict[str, Tensor | None]
    key: str

    def now(self) -> Tensor:
        """Returns what is there now; what was there, if there is nothing.

        Raises:
            RuntimeError: it has another shape, dtype or device.
        """
        found, own = self.held.get(self.key), self.tensor
        if found is None or found is own:
            return own
        if (found.shape, found.dtype, found.device) != (own.shape, own.dtype, own.device):
            raise RuntimeError(
                f"{self.name} was {tuple(own.shape)}, {own.dtype} on {own.device}, and is {tuple(found.shape)},"
                f" {found.dtype} on {found.device} now: under hetero_stale it has a place in the parameter server, and"
                " keeps shape, dtype and device. Use strategy='hetero_balanced'"
            )
        return found


def places(module: nn.Module) -> tuple[list[ParameterPlace], list[ParameterPlace]]:
    """Returns where a module's parameters and its buffers are, each once."""
    found: tuple[list[ParameterPlace], list[ParameterPlace]] = [], []
    seen = set[int]()
    for prefix, layer in module.named_modules():
        for into, held in zip(found, (layer._parameters, layer._buffers), strict=True):
            for key, tensor in held.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    into.append(ParameterPlace(f"{prefix}.{key}" if prefix else key, tensor, held, key))  # type: ignore[arg-type]
    return found


class Numbers(NamedTuple):
    """Some numbers of a tensor, evenly spread, and how exact its dtype is."""

    eps: float
    values: list[float]

    @classmethod
    def of(cls, tensor: Tensor, most: int = 16) -> Numbers:
        """Looks at a tensor."""
        flat = tensor.detach().reshape(-1)
        some = flat[:: max(1, -(-flat.numel() // most))]
        some = torch.view_as_real(some).reshape(-1) if some.is_complex() else some
        return cls(torch.finfo(some.dtype).eps if some.is_floating_point() else 0.0, some.double().tolist())


class ReplicaWatch:
    """See the module; of one replica in flat memory, in which all is as it should be.

    Args:
        layout: of the flat memory.
        area: uint8, the flat memory that parameters are views of.
        parameters: in the layout's order.
        buffers: returns the present ones, in the layout's order.
        held: where modules keep the parameters; none: that is not looked at.
    """

    def __init__(
        self, layout: FlatLayout, area: Tensor, parameters: Sequence[Parameter],
        buffers: Callable[[], Sequence[Tensor]], held: Sequence[ParameterPlace] = (),
    ) -> None:  # fmt: skip
        self._layout, self._parameters, self._buffers = layout, parameters, buffers
        index = {id(p): i for i, p in enumerate(parameters)}
        self._held = [(index[id(p.tensor)], p) for p in held if id(p.tensor) in index]
        self._whole: dict[int, Tensor | None] = {}  # parameters that are compared as a whole; None: at the next read
        each = max(2, min(16, _SAMPLES // max(1, len(parameters))))
        words, self._owners = list[int](), list[int]()  # words that are compared, and whose they are
        for i, (start, stop) in enumerate(layout.ranges[: len(parameters)]):
            if stop > start:
                first, last = start // _WORD_BYTES, (stop - 1) // _WORD_BYTES
                some = range(first, last + 1, max(1, -(-(last - first + 1) // each)))
                words += some
                self._owners += [i] * len(some)
        self._area, self._words = area.view(torch.int32), torch.tensor(words, dtype=torch.int64, device=area.device)
        self._asynchronous = device_of(area.device).asynchronous
        self._noted: dict[Hashable, Tensor] = {}  # which words were others (uint8), by when that was looked for
        self._versions = [parameter._version for parameter in parameters]
        self.came()
        self.settle_buffers()

    def detach(self) -> None:
        """Ends, and lets go of all memory."""
        self._area = self._area[:0]
        self._whole.clear()

    def came(self) -> None:
        """Other parameters have come by a read."""
        self._before = self._now()
        for i in self._whole:
            self._whole[i] = self._parameters[i].detach().clone()

    def moved(self, index: int) -> None:
        """A tensor, of parameters and then buffers, had other memory, and has its place in flat memory again."""
        first = len(self._parameters)
        if index < first:
            self._versions[index] = _OTHER
        else:
            self._buffer_versions[index - first] = _OTHER

    def settle_buffers(self) -> None:
        """The buffers that are there now count as unchanged."""
        self._held_buffers = list(self._buffers())
        self._buffer_versions = [buffer._version for buffer in self._held_buffers]

    # ---- parameters -------------------------------------------------------------------------------------------

    def _counted(self) -> set[int]:
        """Parameters that were written in place, or in whose stead there is another."""
        versions = zip(self._parameters, self._versions, strict=True)
        return {i for i, (now, before) in enumerate(versions) if now._version != before} | self._replaced()

    def _replaced(self) -> set[int]:
        """Parameters in whose stead the module has another."""
        return {i for i, place in self._held if place.held.get(place.key, place.tensor) is not place.tensor}

    def _now(self) -> Tensor:
        return self._area.index_select(0, self._words)

    def _owners_of(self, others: Tensor) -> set[int]:
        """Parameters that have these words."""
        return {i for i, other in zip(self._owners, others.tolist(), strict=True) if other}

    def _seen(self) -> set[int]:
        """Parameters of which some number is another one; waits for their device."""
        now = self._now()
        return set() if torch.equal(now, self._before) else self._owners_of(now != self._before)

    def note(self, when: Hashable) -> None:
        """Has a device that the host does not wait for note what has changed."""
        if self._asynchronous:
            others = (self._now() != self._before).to(torch.uint8)
            self._noted[when] = others | self._noted[when] if when in self._noted else others

    def noted(self) -> list[Tensor]:
        """Returns what shows whether anything was noted (uint8, one number each)."""
        return [others.amax().view(1) for others in self._noted.values() if self._owners]

    def take_noted(self) -> dict[Hashable, set[int]]:
        """Returns, and forgets, which parameters were noted, by when; waits for the device."""
        noted, self._noted = self._noted, {}
        return {when: self._owners_of(others) for when, others in noted.items()}

    @property
    def touched(self) -> bool:
        """Whether a parameter or a buffer may have been changed."""
        return bool(self._counted() or self._seen() or self.written_buffers())

    def changed(self, published: Callable[[], Tensor | None], *, wait: bool = True) -> list[int]:
        """Returns which parameters are not as they came; what looks the same counts as unchanged from here on.

        Args:
            published: returns the area as it came (uint8, on the CPU), or None if it is not to be had any more.
            wait: for a device, whose numbers are not looked at otherwise, see `note`.
        """
        found = self._replaced() | (self._seen() if wait or not self._asynchronous else set())
        doubtful = self._counted() - found
        area = published() if doubtful else None
        for i in doubtful:
            (start, stop), clean = self._layout.ranges[i], self._whole.get(i)
            if area is not None:
                clean = self._layout.parameters[i].view(area[start:stop])
            if clean is None:
                self._whole.setdefault(i, None)
            elif not torch.equal(self._parameters[i].detach().to(clean.device), clean):
                found.add(i)
        self._versions = [parameter._version for parameter in self._parameters]
        return sorted(found)

    # ---- buffers ----------------------------------------------------------------------------------------------

    def written_buffers(self) -> list[int]:
        """Buffers that were written, or in whose stead there is another."""
        known = zip(self._buffers(), self._held_buffers, self._buffer_versions, strict=True)
        return [i for i, (now, held, version) in enumerate(known) if now is not held or now._version != version]
