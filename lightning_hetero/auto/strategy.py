"""`AutoStrategy`: measures a few steps, chooses the engine, and gives it its place in the Trainer (layer L).

    Trainer(strategy="hetero_auto")     launch, process group, hooks of set-up: this strategy, which is DDP until then
    set-up of a fit                     warm-up -> planner -> the engine; its own set-up, and all that follows
    a module that shards itself         hetero_sharded, before ``configure_model`` is called
    one device, evaluation alone        stock DDP; nothing is chosen
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NoReturn

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader
from typing_extensions import Unpack

from lightning_hetero import lightning_compat as compat
from lightning_hetero.auto.choice import ENGINES, Choice, ChosenName, choose, without_measuring
from lightning_hetero.auto.second_look import SecondLook
from lightning_hetero.auto.warm_up import WarmUp
from lightning_hetero.balanced.sharded_strategy import ShardedBalancedStrategy
from lightning_hetero.balanced.strategy import LoadBalancedStrategy
from lightning_hetero.base.arguments import BatchSampling, BatchWeight, DDPArguments, SharedSettings
from lightning_hetero.base.ddp import HeteroDDPStrategy
from lightning_hetero.base.orders import own_data_in
from lightning_hetero.base.refusals import Refusals, shards_itself
from lightning_hetero.base.run import EngineRun, gloo_group
from lightning_hetero.base.setup import CHECKPOINT_KEY
from lightning_hetero.base.strategy import HeteroStrategy
from lightning_hetero.callbacks import ThrottleCallback
from lightning_hetero.controller.lyapunov import LyapunovController
from lightning_hetero.emulate.scenario import Scenario
from lightning_hetero.lightning_compat.strategies import follow, hand_over
from lightning_hetero.measure.device import device_of, is_out_of_memory
from lightning_hetero.pipeline.strategy import HeteroPipelineStrategy
from lightning_hetero.plan.setup import Setup
from lightning_hetero.stale.strategy import BoundedStalenessStrategy
from lightning_hetero.transport.side_channel import SideChannel
from lightning_hetero.types import LossReduction

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_CLASSES: dict[ChosenName, type[HeteroStrategy[Any]]] = {
    "balanced": LoadBalancedStrategy, "pipeline": HeteroPipelineStrategy, "stale": BoundedStalenessStrategy,
    "sharded": ShardedBalancedStrategy,
}  # fmt: skip
_PLANS = {"backbone", "plan", "profile", "micro_batch_size", "max_groups", "depth", "checkpoint_layers"}
_TO_SHARDED = {*SharedSettings.__slots__, "monitor", "accelerator", "process_group_backend", "timeout"}


class AutoStrategy(HeteroDDPStrategy[EngineRun[Any]]):
    """Chooses the engine: the user's step is tried on all devices before training, and the planner decides.

    From then on ``trainer.strategy`` is the engine, an instance of its class, and nothing of this one is in the way;
    `chosen` is the same. Nothing that the trial changes is left changed. The engine stays for the Trainer's life,
    unless it is the balanced one and its own records speak for another: a line says so at an epoch's end, and the
    Trainer's next fit takes that one.

    Args:
        engines: those in question, of ``"hetero_balanced"``, ``"hetero_pipeline"``, ``"hetero_stale"`` and
            ``"hetero_sharded"``; ``None``: all. The stale engine's updates are not those of one process; it is taken
            where it is more than 10 % faster than the others. The sharded one is taken for modules that shard
            themselves in ``configure_model``, and for no others.
        options: arguments of engines, by name, e.g. ``{"hetero_stale": {"bound": 2}}``.
        global_batch_size: samples of all ranks per step; ``None``: the loader's ``batch_size`` times the number of
            devices, as under DDP.
        batch_sampler: what to do with a custom batch sampler: ``"refuse"``, or ``"pool"`` one batch per device.
        loss_reduction: whether ``training_step`` returns a ``"mean"`` or a ``"sum"`` over its batch.
        batch_weight: what the loss is a mean over if not samples, e.g. tokens: ``batch -> number``. A method of that
            name on the LightningModule works too.
        own_data: whether each rank's train dataset has different samples under the same index; ``None``: three samples
            are read and compared.
        monitor: print one line about the ranks at the end of a fit.
        accelerator: as in `DDPStrategy`; the Trainer sets it.
        **ddp: the other arguments of `DDPStrategy` and `DistributedDataParallel`, see `DDPArguments`.

    Attributes:
        chosen: the engine; None before a fit, on one device, and in the process that has started those that train.
        choice: what it was chosen from, and why; None before.

    Raises:
        ValueError: an argument is out of range; when a fit begins: no engine trains the module.
        TypeError: an unknown argument.
    """

    engine = "auto"

    def __init__(
        self, *, engines: Sequence[str] | None = None, options: Mapping[str, Mapping[str, Any]] | None = None,
        global_batch_size: int | None = None, batch_sampler: BatchSampling = "refuse",
        loss_reduction: LossReduction = "mean", batch_weight: BatchWeight | None = None, own_data: bool | None = None,
        monitor: bool = True, accelerator: Accelerator | None = None, **ddp: Unpack[DDPArguments],
    ) -> None:  # fmt: skip
        super().__init__(
            global_batch_size=global_batch_size, batch_sampler=batch_sampler, loss_reduction=loss_reduction,
            batch_weight=batch_weight, own_data=own_data, monitor=monitor, accelerator=accelerator, **ddp,
        )  # fmt: skip
        asked: Sequence[str] = [*_CLASSES] if engines is None else [engines] if isinstance(engines, str) else engines
        names: list[Any] = [name.removeprefix("hetero_") for name in asked]
        of = {name.removeprefix("hetero_"): dict(given) for name, given in (options or {}).items()}
        if not names or set(names) - set(_CLASSES):
            raise ValueError(f"engines={engines!r} must be one or more of hetero_{', hetero_'.join(_CLASSES)}")
        if set(of) - set(names):
            raise ValueError(f"options={options!r} must be arguments by engine, of hetero_{', hetero_'.join(names)}")
        self.engines: tuple[ChosenName, ...] = tuple(name for name in ENGINES if name in names)
        self._takes_sharded = "sharded" in names
        self.options, self._plans_itself = of, bool(_PLANS & {*of.get("pipeline", ())})
        self.choice: Choice | None = None
        of_all = {name: getattr(self.shared, name) for name in SharedSettings.__slots__}
        self._given: dict[str, Any] = {**of_all, "monitor": monitor, "accelerator": accelerator, **ddp}
        self.chosen: HeteroStrategy[Any] | None = None
        self._scenario: Scenario | None = None
        self._second_look: SecondLook | None = None
        self._again: Choice | None = None  # for the next fit
        self._state: dict[str, Any] = {}  # of a checkpoint, until there is an engine to take it
        for name in names:
            self._made(name, {})  # whatever is wrong with the options is said at once

    def __repr__(self) -> str:
        return super().__repr__() if self.chosen is None else repr(self.chosen)

    def _made(self, name: ChosenName, given: Mapping[str, Any]) -> HeteroStrategy[Any]:
        given = {key: value for key, value in given.items() if name != "sharded" or key in _TO_SHARDED}
        return _CLASSES[name](**{**given, **self.options.get(name, {})})

    # ---- set-up -----------------------------------------------------------------------------------------------

    def goes_on_without_a_rank(self) -> bool:
        chosen = self.chosen
        return chosen is not None and chosen.goes_on_without_a_rank()

    def begin(self, trainer: Trainer) -> NoReturn:
        raise AssertionError("an engine begins the run")

    def _chooses(self) -> bool:
        trainer = self._attached_trainer()
        return self.world_size > 1 and trainer is not None and trainer.state.fn == TrainerFn.FITTING

    def setup_environment(self) -> None:
        trainer, module = self._attached_trainer(), self.lightning_module
        if trainer is not None and module is not None and self._takes_sharded and shards_itself(module):
            why = "there is no DistributedDataParallel around a sharded model"
            Refusals(no_wrapper=why).check_ddp_arguments(self.agreed, "hetero_sharded")
            line = f"hetero_auto takes hetero_sharded: {type(module).__name__} shards itself in configure_model"
            self._take(trainer, Choice(engine="sharded", line=line)).setup_environment()
        elif self._chooses():
            super(HeteroStrategy, self).setup_environment()  # the process group; the run is the engine's
        else:
            super().setup_environment()

    def emulate(self, scenario: Scenario) -> bool:
        self._scenario = scenario
        return False  # asked again when there is an engine

    @property
    def measures(self) -> bool:
        return self._chooses()

    def take_state(self, checkpoint: dict[str, Any]) -> None:
        if self._chooses():
            self._state = checkpoint.pop(CHECKPOINT_KEY, {})
        else:
            super().take_state(checkpoint)

    def setup(self, trainer: Trainer) -> None:
        if not self._chooses():
            super().setup(trainer)
            return
        module = trainer.lightning_module
        self.check_module(module)
        with isolate_rng():  # what is drawn from here on is what it would be without a warm-up
            refused = self._refused(module)
            choice, self._again = self._again, None
            if choice is None:
                with closing(SideChannel(gloo_group(self.timeout))) as channel:
                    choice = self._choice(trainer, module, refused, channel)
            if choice.engine == "balanced" and choice.plan is not None:
                self._second_look = SecondLook(choice, self.engines, refused)
            if choice.engine == "pipeline":  # which moves what each rank holds by itself
                module.cpu()
                device_of(self.root_device).empty_cache()
            engine = self._take(trainer, choice)
            engine.setup_environment()
        engine.take_state({CHECKPOINT_KEY: self._state} if self._state else {})
        self._state = {}
        for callback in compat.trainer_callbacks(trainer):
            if isinstance(callback, ThrottleCallback):  # it has asked who sleeps
                callback.setup(trainer, module, "fit")
        engine.setup(trainer)

    def _take(self, trainer: Trainer, choice: Choice) -> HeteroStrategy[Any]:
        (rank_zero_warn if choice.failed else rank_zero_info)(choice.line)
        self.choice, self.chosen = choice, self._made(choice.engine, {**self._given, **self._planned(choice)})
        self.chosen.chosen_by = self
        hand_over(trainer, self, self.chosen)
        return self.chosen

    def _planned(self, choice: Choice) -> dict[str, Any]:
        """Returns what a pipeline needs not measure and plan again; on an accelerator it looks for room."""
        plan, room = choice.plan, device_of(self.root_device).asynchronous
        if plan is None or plan.chosen is None or plan.chosen.plan is None or room or self._plans_itself:
            return {}
        found = {"plan": plan.chosen.plan, "profile": plan.setup.model, "cluster": plan.setup.cluster}
        return {**found, "controller": LyapunovController()}

    def look(self, batch_idx: int | None) -> None:
        """Looks again at what was chosen, on all ranks, when a batch begins; None: when training ends."""
        look, chosen, trainer = self._second_look, self.chosen, self._attached_trainer()
        if look is None or chosen is None or trainer is None:
            return
        look.note(chosen.step_report())
        if batch_idx is None or (batch_idx == 0 and trainer.current_epoch > 0):
            self._again = chosen.broadcast(look.choose() if self.is_global_zero else None)
            if self._again is not None:
                self._second_look = None
                rank_zero_info(self._again.line)

    def takes_over(self, trainer: Trainer) -> bool:
        """Takes the engine's place again, when a fit begins that is to have another one; returns whether it does."""
        if self._again is None or self.chosen is None:
            return False
        hand_over(trainer, self.chosen, self)
        return True

    def _refused(self, module: LightningModule) -> dict[str, str]:
        """Returns why engines do not train this module with these arguments; the same on all ranks."""
        refused: dict[str, str] = {}
        for name in self.engines:
            try:
                engine = self._made(name, self._given)
                follow(self, engine)
                engine.check_module(module)
            except (TypeError, ValueError) as error:
                refused[name] = str(error)
        return refused

    def _choice(
        self, trainer: Trainer, module: LightningModule, refused: Mapping[str, str], channel: SideChannel
    ) -> Choice:
        loader: Any = compat.train_source(trainer)
        indexed = [loader] if isinstance(loader, DataLoader) else []
        if own := own_data_in(indexed, self.shared.own_data, trainer, channel):
            refused = {**dict.fromkeys(set(self.engines) - {"balanced"}, own), **refused}
        able = [name for name in self.engines if name not in refused]
        batch = self.shared.global_batch_size or (getattr(loader, "batch_size", None) or 0) * self.world_size
        why = "" if module.automatic_optimization else "with manual optimization a step cannot be tried"
        if not batch:
            why = "the train loader does not tell the size of its batches"
        if len(able) < 2:
            why = "no other is in question"
        if why:
            return without_measuring(self.engines, refused, why)
        if isinstance(self.precision_plugin, HalfPrecision):  # its context expects it
            self.precision_plugin.convert_module(module)
        warm_up = WarmUp(
            strategy=self, module=module, loader=loader, channel=channel, global_batch=batch,
            scenario=self._scenario, layers="pipeline" in able,
        )  # fmt: skip
        try:
            return self._agreed(channel, warm_up.measure(), refused)
        except RuntimeError as error:
            left = self.engines
            if ("OutOfMemoryError" in str(error) or is_out_of_memory(error)) and "pipeline" in left:
                left = ("pipeline", *left)
            return without_measuring(left, refused, str(error), failed=True)

    def _agreed(self, channel: SideChannel, setup: Setup, refused: Mapping[str, str]) -> Choice:
        """Returns rank 0's choice: others may round otherwise."""
        try:
            mine: Choice | ValueError = choose(setup, self.engines, refused)
        except ValueError as error:
            mine = error
        answer = channel.all_gather_object(mine)[0]
        if isinstance(answer, ValueError):
            raise answer
        return answer
