"""A worker's end of the parameter server: newest parameters in, gradients out (layer T).

attach   parameters become views of one flat memory [replica], so a pull is one copy
claim    -> a grant: pull, compute; gradients go into the slot while backward runs, bucket by bucket as in DDP
push     what changed since (unscaled, edited by hooks) is copied again; the reply is the next grant, or "passed"
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hetero.stale import codec as trees
from lightning_hetero.stale.compress import Codec, by_name
from lightning_hetero.stale.flags import PushFlag
from lightning_hetero.stale.hyper import CLIP_NORM, CLIP_VALUE, HyperParameters
from lightning_hetero.stale.layout import FlatLayout
from lightning_hetero.stale.pinned import Pinned
from lightning_hetero.stale.replica import Replica
from lightning_hetero.stale.slot import BUCKET_BYTES, SlotWriter
from lightning_hetero.transport.base import Ask, Link, Reply, Request, Say, ServerLostError

__all__ = ["RemoteFailureError", "ServerLostError", "Worker"]


class RemoteFailureError(RuntimeError):
    """The run cannot go on; the message is the server's reason, and names the worker it came from."""


class Worker:
    """See the module.

    Args:
        link: the transport's end.
        layout: the server's, by digest.
        parameters, buffers: as in the layout; a callable returns the module's present buffers, for modules that
            replace theirs.
        optimizers: whose hyper-parameters travel with each push.
        codec: must be the layout's.
        overlap: copy gradients while backward runs; None: if they are on a GPU, or so many that it takes time. Pass
            False where gradients are changed behind autograd's back afterwards, as `torch.amp.GradScaler` does.
        clock: own time [s].
        timeout_s: how long to wait for an answer; None: as long as the server lives.

    Attributes:
        link: as given.
        version: of the parameters pulled last; -1 before.

    Raises:
        ValueError: parameters, buffers or optimizers are not the layout's.
    """

    def __init__(
        self,
        link: Link,
        layout: FlatLayout,
        parameters: Sequence[Parameter],
        buffers: Sequence[Tensor] | Callable[[], Sequence[Tensor]] = (),
        optimizers: Sequence[Optimizer] = (),
        *,
        codec: Codec | str | None = None,
        overlap: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
        timeout_s: float | None = None,
    ) -> None:
        self.link, self.layout = link, layout
        if by_name(codec) != layout.codec:
            raise ValueError(f"codec={codec!r} is not the layout's, {layout.codec!r}: give both the same")
        self._hyper = HyperParameters(optimizers)
        self._clips = [(0, 0.0)] * len(optimizers)
        if self._hyper.digest != layout.meaning:
            raise ValueError("the layout was made for other optimizers: pass optimizers= to FlatLayout.of")
        self._replica = Replica(layout, parameters, buffers)
        self._clock, self._timeout_s = clock, timeout_s
        self._pinned: list[Pinned] = []
        self.version = -1
        self._writer = SlotWriter(link, layout, self.parameters)
        on_cuda = any(parameter.device.type == "cuda" for parameter in self.parameters)
        self._overlap = on_cuda or layout.slot_bytes > BUCKET_BYTES if overlap is None else overlap
        self._grant: Reply | None = None
        self._grant_s = 0.0
        self._substep = 0
        self._substeps_used = False
        self._buffers_pushed = False  # since the last pull
        self._epoch, self._tick = 0, 0

    @property
    def parameters(self) -> list[Parameter]:
        """Each once, in the layout's order."""
        return self._replica.parameters

    # ---- parameters -------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Moves parameters and buffers into flat memory and starts to watch gradients; idempotent."""
        if self._replica.attached:
            return
        self._replica.attach()
        if self._replica.on_cuda:
            self._pinned.append(Pinned(self.link.gradient))
        if self._overlap:
            self._writer.attach()

    def detach(self) -> None:
        """Gives parameters and buffers memory of their own, with their present values; idempotent."""
        if not self._replica.attached:
            return
        self._writer.detach()
        self._replica.detach()
        for pinned in self._pinned:
            pinned.release()
        self._pinned.clear()
        self.version = -1

    @contextmanager
    def no_copy(self) -> Iterator[None]:
        """Inside, backward passes accumulate and nothing is copied yet; like DDP's ``no_sync``, but only saves time."""
        with self._writer.paused():
            yield

    @property
    def is_newest(self) -> bool:
        """Whether the newest parameters and buffers are here for certain.

        Sub-steps change parameters under the same version; after a push that was not applied, buffers are the rank's.
        """
        certain = self.version >= 0 and not self._substeps_used and not self._buffers_pushed
        return certain and self.link.newest_version() <= self.version

    def pull(self) -> int:
        """Puts the newest published parameters and buffers into the module; returns their version.

        If the newest are there already, only the buffers are put back, which forward passes change.
        """
        if not self._replica.attached:
            raise RuntimeError("call Worker.attach before pull")
        self._replica.adopt()
        if self.is_newest:
            self._replica.restore_buffers()
        else:
            self.version = self._replica.read(self.link.read_parameters)
            self._buffers_pushed = False
        return self.version

    def gradients(self) -> list[Tensor | None]:
        """Returns the present gradients, in the order of `parameters`."""
        return [parameter.grad for parameter in self.parameters]

    # ---- messages ---------------------------------------------------------------------------------------------

    def _call(self, request: Request) -> Reply:
        reply = self.link.call(request, timeout_s=self._timeout_s)
        if reply.kind is Say.FAILED:
            raise RemoteFailureError(reply.text)
        return reply

    def begin_epoch(
        self,
        epoch: int,
        ends: Sequence[int],
        *,
        applied: Iterable[tuple[int, int]] = (),
        tick: int = 0,
        text: str = "",
    ) -> Reply:
        """Begins an epoch, which all workers must do alike.

        Args:
            epoch: its number.
            ends: cumulative samples behind each of its ticks.
            applied: spans of samples that are applied already, when an epoch is resumed ...
            tick: ... at this tick.
            text: the same two as a JSON object, ``{"applied": [[start, end], ...], "tick": tick}``.

        Returns:
            A reply whose ``numbers`` are spans, flat: one for each of the next ``ahead`` ticks, what this worker will
            probably be granted in it, (0, 0) for nothing. Its ``epoch`` and ``tick`` are the server's, which may be
            further on for a worker that comes late.

        Raises:
            RemoteFailureError: the workers disagree, or the run has failed.
        """
        said = json.loads(text) if text else {"applied": [list(span) for span in applied], "tick": tick}
        said["layout"] = self.layout.digest
        self._epoch, self._tick, self._grant = epoch, int(said.get("tick", 0)), None
        return self._call(Request(kind=Ask.EPOCH, epoch=epoch, numbers=ends, text=json.dumps(said)))

    def claim(self, epoch: int, tick: int) -> Reply:
        """Asks for work in a batch; returns ``Say.GRANT`` or ``Say.PASSED``, perhaps after a while.

        A grant's ``numbers`` are spans of samples, flat, none for a dummy batch; `pull` before computing. With
        ``PASSED`` they are one `Word` per tick from ``tick`` to the server's.

        Raises:
            RemoteFailureError: the run has failed.
            ServerLostError: the server is gone.
        """
        self._epoch, self._tick = epoch, tick
        return self._granted(self._call(Request(kind=Ask.CLAIM, epoch=epoch, tick=tick)))

    def _granted(self, reply: Reply) -> Reply:
        self._grant = reply if reply.kind is Say.GRANT else None
        self._grant_s = self._clock()
        self._substep = 0
        return reply

    def push(
        self,
        flags: int = PushFlag.FINAL,
        *,
        epoch: int | None = None,
        tick: int | None = None,
        substep: int | None = None,
        lease: int | None = None,
        samples: int | None = None,
        weight: float | None = None,
        compute_s: float | None = None,
        steps: int = 0,
        zeroes: int = 0,
    ) -> Reply:
        """Hands over the gradients in ``.grad``, which are None afterwards.

        Args:
            flags: `PushFlag`; without FINAL more pushes of this batch follow, and the answer is ``Say.APPLIED``.
            epoch, tick, substep, lease: default to the present grant and a count.
            samples: computed samples; default the grant's. Gradients are means over them.
            weight: what they count in the mean over the update; default the samples.
            compute_s: time they took; default since the grant.
            steps, zeroes: bit i: optimizer i steps now / was zeroed before.

        Returns:
            With FINAL like `claim`; else ``APPLIED``: pull again before going on.

        Raises:
            RuntimeError: there is no grant to push for.
            RemoteFailureError, ServerLostError: see `claim`.
        """
        grant = self._grant
        if lease is None or samples is None:
            if grant is None or not grant.numbers:
                raise RuntimeError(
                    "nothing was granted to this worker, or a dummy batch, which is not pushed"
                )
            lease = grant.lease if lease is None else lease
            samples = sum(grant.numbers[1::2]) - sum(grant.numbers[::2]) if samples is None else samples
        self._replica.adopt()
        self._buffers_pushed = bool(self.layout.buffers)
        slot = self._writer.write(self._replica.buffers(), lambda numbers: self._hyper.write(numbers, self._clips))
        self._clips = [(0, 0.0)] * len(self._clips)
        request = Request(
            kind=Ask.PUSH,
            epoch=self._epoch if epoch is None else epoch,
            tick=self._tick if tick is None else tick,
            substep=self._substep if substep is None else substep,
            lease=lease,
            samples=samples,
            weight=float(samples) if weight is None else weight,
            compute_s=self._clock() - self._grant_s if compute_s is None else compute_s,
            flags=int(flags),
            steps=steps,
            zeroes=zeroes,
            slot=slot,
        )
        reply = self._call(request)
        if flags & PushFlag.FINAL:
            return self._granted(reply)
        self._substep += 1
        self._substeps_used = True
        return reply

    def give_back(self) -> None:
        """Returns the present grant, if there is one: it will not be computed."""
        grant, self._grant = self._grant, None
        if grant is not None and grant.numbers:
            self._call(Request(kind=Ask.RETURN, epoch=self._epoch, tick=self._tick, lease=grant.lease))

    def meet(self, number: int, what: str = "") -> Reply:
        """Waits for all live workers to meet, too; ``numbers`` of the reply are their ranks.

        Args:
            number: of the meeting; the same everywhere.
            what: its purpose; the same everywhere, or the run fails and names both sides.
        """
        return self._call(Request(kind=Ask.MEET, tick=number, text=what))

    @staticmethod
    def parse_metrics(met: Reply) -> dict[str, Any]:
        """Returns the server's `Meters`, from the reply of `meet`."""
        return json.loads(met.text)["metrics"]

    @staticmethod
    def parse_notices(met: Reply) -> list[str]:
        """Returns what the server has to say to people, from the reply of `meet`; other replies have it as text."""
        return json.loads(met.text)["notices"]

    def metrics(self) -> dict[str, Any]:
        """Returns what the server has counted and predicts now: `ParameterServer.measures`."""
        return json.loads(self._call(Request(kind=Ask.METRICS)).text)

    def state(self) -> dict[str, Any]:
        """Returns the server's state: ``version``, ``optimizers``, ``coordinator``, ``metrics``."""
        self._call(Request(kind=Ask.STATE))
        return trees.decode(self.link.read_state())

    def abort(self, text: str) -> None:
        """Tells everybody that this worker has failed, if there still is somebody to tell; never raises for that."""
        with suppress(ServerLostError):
            self.link.call(Request(kind=Ask.ABORT, text=text), timeout_s=self._timeout_s)

    def leave(self) -> None:
        """Says goodbye; the link stays open until it is closed."""
        self._call(Request(kind=Ask.LEAVE))

    def wants_return(self, grant: Reply, threshold: int | None = None) -> bool:
        """Whether a worker in the middle of a grant should return what it has, without a message.

        Args:
            threshold: version gap from which it should; None: the grant's, carried in ``flags``; 0: never.
        """
        gap = grant.flags if threshold is None else threshold
        return gap > 0 and self.link.newest_version() - grant.version >= gap

    def clip(self, optimizer: int, value: float | None, kind: Any = "norm") -> None:
        """Has the server clip the *global* gradient of an optimizer at the step of the next push.

        Args:
            optimizer: its number.
            value: greatest norm, or greatest magnitude; None or 0: no clipping.
            kind: ``"norm"`` or ``"value"``, or an enumeration with these values; None means norm.
        """
        kind = getattr(kind, "value", kind) or "norm"
        if kind not in ("norm", "value"):
            raise ValueError(f"gradient clipping by {kind!r} must be by 'norm' or 'value'")
        number = CLIP_NORM if kind == "norm" else CLIP_VALUE
        self._clips[optimizer] = (number, float(value)) if value else (0, 0.0)
