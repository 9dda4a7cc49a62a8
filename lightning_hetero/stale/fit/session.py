"""This rank's end of the parameter server, for a whole fit (layer L).

    every rank    share: takes stock of what is trained
    lowest rank   serve: forks the server off this process -> an address, which the others get
    every rank    connect -> a worker ... fetch_state, bring_home: the optimizers' state comes back ... leave

A server that has other parameters than the optimizers is left, and the same is done once more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_hetero.base.elastic.ddp import ElasticDDPStrategy
from lightning_hetero.stale.decide.policy import Policy
from lightning_hetero.stale.fit.held_state import hold, release
from lightning_hetero.stale.fit.refusals import Changed
from lightning_hetero.stale.runtime.fork import ServerProcess
from lightning_hetero.stale.runtime.layout import FlatLayout
from lightning_hetero.stale.runtime.messages import MetAtServer
from lightning_hetero.stale.runtime.start import Address, ServerSettings, connect, start_server
from lightning_hetero.stale.runtime.work.watch import Numbers, ParameterPlace, places
from lightning_hetero.stale.runtime.work.worker import Worker
from lightning_hetero.transport.pulse import Pulse

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_LAST_S = 5.0  # that a rank which was told to end (SIGTERM) waits for the server's answer
_DYING_S = 2.0  # from the end of a killed process' connections to its own


@dataclass(frozen=True, slots=True)
class _Shared:
    """What a server is started with: all it trains, and by identity which parameters each group of optimizers has."""

    layout: FlatLayout
    trained: list[ParameterPlace]
    buffers: list[ParameterPlace]
    others: list[ParameterPlace]  # parameters that no optimizer has
    numbers: dict[str, Numbers]  # of each of these, as they were
    groups: list[list[list[int]]]

    @property
    def parameters(self) -> list[Parameter]:
        return [place.tensor for place in self.trained]  # type: ignore[misc]

    def present_buffers(self) -> list[Tensor]:
        """Returns them as the module has them now."""
        return [place.now() for place in self.buffers]


class Session:
    """See the module.

    Args:
        trainer: gives module, optimizers and precision.
        strategy: that of the trainer.
        settings: of the server.
        meetings: see the attribute.

    Attributes:
        worker: this rank's end, from `connect` to `leave`. Other threads ask, too: read it once.
        state: the server's, as fetched last.
        meetings: how often the ranks have met, also before this one came.
        patience: how long to wait for others: the timeout, or torch's usual one.
    """

    _held: Sequence[Optimizer] = ()  # whose state the server has

    def __init__(
        self, trainer: Trainer, strategy: ElasticDDPStrategy[Any], settings: ServerSettings, *, meetings: int = 0
    ) -> None:
        self._trainer, self._strategy, self._settings, self._members = trainer, strategy, settings, strategy.members
        self.patience = strategy.timeout or timedelta(minutes=30)
        self.worker: Worker | None = None
        self.state: dict[str, Any] = {}
        self.meetings = meetings
        self._address: Address | None = None
        self._shared: _Shared | None = None
        self._process: ServerProcess | None = None
        self._pulse: Pulse | None = None

    @property
    def address(self) -> Address:
        """Of the server; known from `connect` on."""
        assert self._address is not None
        return self._address

    def alive(self) -> Collection[int]:
        """Returns who lives now, as the server tells everybody."""
        assert self.worker is not None
        return self.worker.alive()

    def expect(self, ranks: Collection[int]) -> None:
        """The server knows who comes as soon as it is connected."""

    # ---- from here to a worker --------------------------------------------------------------------------------

    def share(self) -> None:
        """Takes stock of what the optimizers train now.

        Raises:
            ValueError: an optimizer updates a parameter that is not the module's.
        """
        module, optimizers = self._trainer.lightning_module, self._trainer.optimizers
        held, buffers = places(module)
        named = {id(place.tensor): place for place in held}
        owned = {id(p): p for o in optimizers for g in o.param_groups for p in g["params"]}
        stray = [tuple(p.shape) for i, p in owned.items() if i not in named]
        if stray:
            raise ValueError(
                f"an optimizer updates {len(stray)} parameters that are not the LightningModule's (shapes"
                f" {stray[:3]}); register their module on the LightningModule"
            )
        trained = [place for i, place in named.items() if i in owned]
        layout = FlatLayout.of(
            [(place.name, place.tensor) for place in trained], [(place.name, place.tensor) for place in buffers],
            optimizers=optimizers, compression=self._settings.compression,
        )  # fmt: skip
        others = [place for i, place in named.items() if i not in owned]
        self._shared = _Shared(layout, trained, buffers, others, _numbers_of(others), self._groups_now())

    def serve(self, *, ahead: int, state: Mapping[str, Any], policy: Policy | None = None) -> Address:
        """Starts the server for what is shared; returns where it is.

        Args:
            ahead: batches that workers fetch ahead.
            state: of the coordinator, from a checkpoint; else empty.
            policy: instead of the strategy's.
        """
        shared, strategy, members, settings = self._shared, self._strategy, self._members, self._settings
        assert shared is not None
        near = members.near if settings.transport != "pairs" else ()
        divide_by = float(members.world_size) if strategy.shared.loss_reduction == "sum" else None
        self._process, address = start_server(
            layout=shared.layout, parameters=shared.parameters, buffers=shared.present_buffers(),
            optimizers=self._trainer.optimizers,
            settings=replace(settings, policy=policy or settings.policy, divide_by=divide_by),
            ranks=members.alive, near=near, far=[r for r in range(members.world_size) if r not in near],
            ahead=ahead, state=dict(state), host=strategy.host_name(), timeout=self.patience,
        )  # fmt: skip
        return address

    def connect(self, address: Address) -> None:
        """Connects this rank to the server; the newest parameters come, the optimizers' state is the server's now."""
        shared, optimizers = self._shared, self._trainer.optimizers
        assert shared is not None
        self._address = address
        self.worker = worker = Worker(
            connect(address, self._members.rank, self.patience),
            shared.layout,
            shared.parameters,
            shared.present_buffers,
            optimizers,
            held=shared.trained,
            # A scaler divides gradients in place after the backward pass, where no hook sees it.
            overlap=None if getattr(self._trainer.precision_plugin, "scaler", None) is None else False,
            tell=self._members.warn_once,
        )
        worker.link.waits = self._may_wait
        self._pulse = Pulse(worker.link, self._settings.liveness_s)
        worker.pull()
        if not self._members.is_lowest:
            for optimizer in optimizers:
                optimizer.state.clear()
        hold(optimizers)
        self._held = optimizers

    def _may_wait(self, waited_s: float) -> None:
        """A process that was asked to end does not wait for the end of its batch, which may never come."""
        if waited_s > _LAST_S and self._trainer.received_sigterm:
            raise SIGTERMException

    def _groups_now(self) -> list[list[list[int]]]:
        return [[[id(p) for p in g["params"]] for g in o.param_groups] for o in self._trainer.optimizers]

    @property
    def outdated(self) -> bool:
        """Whether the optimizers have other parameters than the server was started with."""
        assert self._shared is not None
        return self._groups_now() != self._shared.groups

    def changed(self) -> Changed:
        """Returns what the user's code has changed where the ranks met, and of parameters no optimizer has at all."""
        worker, shared = self.worker, self._shared
        assert worker is not None and shared is not None
        names, buffers = worker.weights.changes()
        trained = [place for place in shared.trained if place.name in set(names)]
        known = {id(place.tensor) for place in shared.trained}
        known |= {id(place.now()) for place in (*shared.others, *shared.buffers)}  # compared by what they are
        found = [place for part in places(self._trainer.lightning_module) for place in part]
        new = tuple(place.name for place in found if id(place.tensor) not in known)
        now = _numbers_of(shared.others)
        others = {name: now[name] for name, numbers in shared.numbers.items() if numbers != now[name]}
        return Changed(_numbers_of(trained), others, tuple(buffers), new)

    def settle_others(self) -> None:
        """What parameters that no optimizer has are now counts as unchanged."""
        assert self._shared is not None
        self._shared.numbers.update(_numbers_of(self._shared.others))

    def others_now(self) -> list[tuple[int, int]]:
        """Returns what changes if a parameter that no optimizer has is written in place, or replaced."""
        assert self._shared is not None
        return [(tensor._version, tensor.data_ptr()) for tensor in (place.now() for place in self._shared.others)]

    # ---- with a worker ----------------------------------------------------------------------------------------

    def meet(self, what: str, *, sound: bool = True, call: int | None = None) -> MetAtServer:
        """Waits at the server for all live ranks; see `Worker.meet`."""
        assert self.worker is not None
        self.meetings += 1
        return self.worker.meet(self.meetings, what, call, sound=sound)

    def fetch_state(self) -> None:
        """Renews `state` (lowest rank), with the parameters of the very same version on this rank."""
        assert self.worker is not None
        # What callbacks have put in place of these parameters, e.g. averages, stays.
        self.state = self.worker.state()

    def bring_home(self) -> None:
        """The state of the server's optimizers comes into those of the lowest rank, which writes checkpoints."""
        release(self._held)
        if not self._members.is_lowest:
            return
        self.fetch_state()
        assert self._shared is not None
        known = zip(self._trainer.optimizers, self._shared.groups, self.state["optimizers"], strict=True)
        for optimizer, groups, own in known:
            before = [i for group in groups for i in group]
            held = {before[index]: entry for index, entry in own["state"].items()}
            present = [id(p) for group in optimizer.param_groups for p in group["params"]]
            entries = {index: held[i] for index, i in enumerate(present) if i in held}
            for group, changed in zip(optimizer.param_groups, own["groups"], strict=False):  # perhaps more than then
                group.update(changed)
            optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})

    def leave(self) -> None:
        """Says goodbye; the server ends with the lowest rank's session."""
        worker, self.worker = self.worker, None
        assert worker is not None
        worker.detach()
        try:
            worker.leave()
        finally:
            self._hang_up(worker)
        self.close(patience_s=10.0)

    def close(self, *, patience_s: float = 5.0) -> None:
        """Ends this rank's part, without a word to anybody; idempotent."""
        worker, self.worker = self.worker, None
        release(self._held)
        if worker is not None:
            worker.detach()
            self._hang_up(worker)
        cut_off = worker is not None and (worker.link.left_behind or worker.link.cut)
        process, self._process = self._process, None
        # A server that hangs is not killed at once: the other ranks are about to find out, too, and to say why.
        # A process that is killed closes its connections before it is gone, and leaves work for `stop`.
        if process is not None and cut_off and not process.ends_within(_DYING_S):
            process.release()  # it serves the others
        elif process is not None:
            process.stop(patience_s)

    def _hang_up(self, worker: Worker) -> None:
        pulse, self._pulse = self._pulse, None
        if pulse is not None:
            pulse.stop()
        worker.link.close()


def _numbers_of(held: list[ParameterPlace]) -> dict[str, Numbers]:
    return {place.name: Numbers.of(place.now()) for place in held}
