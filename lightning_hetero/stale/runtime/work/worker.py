"""A worker's end of the parameter server: newest parameters in, gradients out (layer T).

made     parameters become views of one flat memory [weights], so a pull is one copy
claim    -> a grant: pull, compute; gradients go into the slot while backward runs, bucket by bucket as in DDP
push     what changed since (unscaled, edited by hooks) is copied again; the reply is the next grant, or "passed"

What else changes parameters, or buffers after the push, would be overwritten by the next pull: every message looks for
it. Where all ranks meet it is kept, and `changes` tells of it; else it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hetero.measure.device import device_of
from lightning_hetero.stale.decide.report import Measures
from lightning_hetero.stale.runtime.hyper_parameters import CLIP_NORM, CLIP_VALUE, HyperParameters
from lightning_hetero.stale.runtime.layout import FlatLayout
from lightning_hetero.stale.runtime.messages import MetAtServer, failure_of, failure_text, state_of
from lightning_hetero.stale.runtime.work.gradient_writer import GradientWriter, Readout
from lightning_hetero.stale.runtime.work.watch import ParameterPlace
from lightning_hetero.stale.runtime.work.weights import Phase, PulledWeights
from lightning_hetero.transport.base import Ask, Reply, Request, Say, ServerLostError
from lightning_hetero.transport.flags import PushFlag, ReplyFlag
from lightning_hetero.transport.link import WorkerLink


class Worker:
    """See the module.

    Args:
        link: the transport's end.
        layout: the server's, by digest.
        parameters: each once, in the layout's order.
        buffers: returns the module's present buffers, in the layout's order; modules may replace theirs.
        optimizers: whose hyper-parameters travel with each push.
        held: where modules keep the parameters, see `ReplicaWatch`.
        overlap: copy gradients while backward runs; None: if they are on a GPU, or so many that it takes time. Pass
            False where gradients are changed behind autograd's back afterwards, as `torch.amp.GradScaler` does.
        tell: shows people what the server has to say; it comes with an answer, whatever was asked.

    Attributes:
        link: as given.
        parameters: as given.
        weights: what of the server's is here, and what the user's code has changed of it.
        brought: what the server had counted when the last answer was given, if that brought it, see `ask_measures`.
    """

    def __init__(
        self, link: WorkerLink, layout: FlatLayout, parameters: Sequence[Parameter],
        buffers: Callable[[], Sequence[Tensor]] = list, optimizers: Sequence[Optimizer] = (), *,
        held: Sequence[ParameterPlace] = (), overlap: bool | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.link, self._layout, self._tell = link, layout, tell
        self._hyper = HyperParameters(optimizers)
        self._clips = [(0, 0.0)] * len(optimizers)
        self.weights = PulledWeights(link, layout, parameters, buffers, held)
        self.parameters = self.weights.parameters
        device = self.weights.area.device
        self._unlock = [device_of(device).page_lock(memory.data_ptr(), memory.numel()) for memory in link.shared]
        self._writer = GradientWriter(link, layout, self.parameters, device, overlap=overlap)
        self._wanted = PushFlag(0)  # besides, with claims and pushes
        self.brought: Measures | None = None

    def detach(self) -> None:
        """Gives parameters and buffers their own memory, with their present values; idempotent."""
        self._writer.detach()
        self.weights.detach()
        while self._unlock:
            if (unlock := self._unlock.pop()) is not None:
                unlock()

    def pull(self) -> int:
        """Puts the newest published parameters and buffers into the module; returns their version.

        If the newest are there already, only the buffers are put back, which forward passes change.
        """
        return self.weights.pull()

    def gradients(self) -> list[Tensor | None]:
        """Returns the present gradients, in the order of `parameters`."""
        return [parameter.grad for parameter in self.parameters]

    # ---- messages ---------------------------------------------------------------------------------------------

    def _call(self, request: Request) -> Reply:
        self.brought = None
        reply = self.link.call(request)
        if reply.kind is Say.FAILED:
            raise failure_of(reply.text)
        if reply.kind is Say.PASSED and reply.flags & ReplyFlag.MEASURES:
            self._wanted, self.brought = PushFlag(0), Measures.of(json.loads(reply.text))
            return replace(reply, text="")
        if self._tell is not None and request.kind in (Ask.EPOCH, Ask.CLAIM, Ask.PUSH):
            for notice in reply.text.splitlines():
                self._tell(notice)
        return reply

    def begin_epoch(
        self, epoch: int, ends: Sequence[int], *, applied: Iterable[tuple[int, int]] = (), global_step: int = 0,
        streams: Sequence[int] = (),
    ) -> Reply:  # fmt: skip
        """Begins an epoch; all workers must do the same.

        Args:
            epoch: its number.
            ends: cumulative samples behind each of its global steps.
            applied: spans of samples that are applied already, when an epoch is resumed ...
            global_step: ... at this one.
            streams: of the ranks' own, instead of ends, see `Streams.numbers`.

        Returns:
            A reply whose ``numbers`` are spans, flat: one for each of the next ``ahead`` global steps, what this worker
            will probably be assigned in it, (0, 0) for nothing. Its ``epoch`` and ``global_step`` are the server's,
            which may be further on for a worker that comes late.

        Raises:
            RemoteFailureError: the workers disagree, or the run has failed.
        """
        numbers = (-1, *streams) if streams else (len(ends), *ends, *chain.from_iterable(applied))
        text = self._layout.digest
        reply = self._call(Request(kind=Ask.EPOCH, epoch=epoch, global_step=global_step, numbers=numbers, text=text))
        self.weights.go_on(Phase.BETWEEN)
        return reply

    def claim(self, epoch: int, global_step: int, read: Sequence[int] = ()) -> Reply:
        """Asks for work in a batch; returns ``Say.ASSIGNED`` or ``Say.PASSED``, perhaps after a while.

        An assignment's ``numbers`` are spans of samples, flat, none for a dummy batch; `pull` before computing. With
        ``PASSED`` they are one `Word` per global step from ``global_step`` to the server's.

        Args:
            epoch, global_step: where this worker is.
            read: samples read of this worker's own stream, and whether that is through; empty: no stream.

        Raises:
            RemoteFailureError: the run has failed.
            ServerLostError: the server is gone.
        """
        self.weights.look()
        request = Request(kind=Ask.CLAIM, epoch=epoch, global_step=global_step, flags=self._wanted, numbers=read)
        return self._answered(self._call(request))

    def _answered(self, reply: Reply) -> Reply:
        self.weights.answered(Phase.BETWEEN if reply.kind is Say.PASSED else Phase.BATCH)
        return reply

    def push(self, request: Request, compute_s: Callable[[], float]) -> Reply:
        """Hands over the gradients in ``.grad``, means over at least one sample, which are None afterwards.

        Args:
            request: says what they are, except its slot and the time. Without `PushFlag.FINAL` more pushes of this
                batch follow, and the answer is ``Say.APPLIED``.
            compute_s: returns the time they took [s]; asked when the device has come to the push.

        Returns:
            With FINAL like `claim`; else ``APPLIED``: pull again before going on.

        Raises:
            RemoteFailureError, ServerLostError: see `claim`.
        """
        weights, told = self.weights, Readout()
        weights.look()
        noted = [told.add(each) for each in weights.noted()]
        weights.pushed(substep=not request.flags & PushFlag.FINAL)
        slot = self._writer.write(
            weights.buffer_bytes, weights.clean_bytes, lambda numbers: self._hyper.write(numbers, self._clips), told
        )
        if any(map(any, noted)):
            weights.refuse_noted()
        self._clips = [(0, 0.0)] * len(self._clips)
        flags = request.flags | self._wanted
        return self._answered(self._call(replace(request, slot=slot, compute_s=compute_s(), flags=flags)))

    def meet(self, number: int, what: str = "", call: int | None = None, *, sound: bool = True) -> MetAtServer:
        """Waits for all live workers to meet, too.

        Args:
            number: of the meeting; the same everywhere.
            what: its purpose; the same everywhere, or the run fails and names both sides.
            call: number of an optimizer whose method the server is to call, when all have come: ``what`` begins with
                its name and a bracket. Pull afterwards.
            sound: what was done since the last meeting has worked here.
        """
        self.weights.look_where_all_meet()
        steps = 0 if call is None else 1 << call
        if steps and self.weights.kept:
            raise RuntimeError(
                f"{what}: parameters or buffers were changed on rank {self.link.rank} before it, which the parameter"
                " server, where it is called, does not know. Change them behind it, or use strategy='hetero_balanced'"
            )
        reply = self._call(Request(kind=Ask.MEET, global_step=number, text=what, steps=steps, flags=not sound))
        self.weights.stop()
        if steps:
            self.weights.version = -1  # whatever is here
        self._wanted = PushFlag(0)  # for a batch that is over
        return MetAtServer.read(reply)

    @property
    def awaits_measures(self) -> bool:
        """Whether `ask_measures` was called and the answer has not come."""
        return bool(self._wanted)

    def ask_measures(self) -> None:
        """Has the answer that ends the batch bring what the server has counted, without a separate request."""
        self._wanted = PushFlag.MEASURES

    def measures(self) -> Measures:
        """Returns what the server has counted and knows of now."""
        return Measures.of(json.loads(self._call(Request(kind=Ask.METRICS)).text))

    def alive(self) -> frozenset[int]:
        """Returns the ranks that the server takes to be alive."""
        return frozenset(self._call(Request(kind=Ask.METRICS)).numbers)

    def state(self) -> dict[str, Any]:
        """Returns the server's state: ``version``, ``optimizers``, ``coordinator``.

        The parameters and buffers of this very version are in the module then. They come with the state unless they
        are there: while others train, the published ones may be newer each time that one looks.
        """
        weights = self.weights
        weights.look_where_all_meet()
        self._call(Request(kind=Ask.STATE, numbers=(weights.version if weights.whole or weights.kept else -1,)))
        state = state_of(self.link.read_state())
        area = state.pop("area", None)

        def read(into: Tensor) -> int:
            into.copy_(area)
            return state["version"]

        if area is not None:
            weights.read(read)
        return state

    def abort(self, text: str, error: BaseException | None = None) -> None:
        """Tells everybody that this worker has failed, if there still is somebody to tell; never raises for that.

        Args:
            text: why, in words.
            error: the cause; raised by the others, too, see `failure_of`.
        """
        with suppress(ServerLostError):
            self.link.call(Request(kind=Ask.ABORT, text=failure_text(text, error)))

    def leave(self) -> None:
        """Says goodbye; the link stays open until it is closed."""
        self._call(Request(kind=Ask.LEAVE))

    def wants_return(self, grant: Reply) -> bool:
        """Whether a worker in the middle of a grant should return what it has, without a message.

        That is so from a version gap on that the grant carries in ``flags``; 0: never.
        """
        return grant.flags > 0 and self.link.newest_version() - grant.version >= grant.flags

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
