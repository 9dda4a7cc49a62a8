"""`ElasticDDPStrategy`: DDP among ranks of which one may die, or come again, while the others train on (layer L).

    launch        a rank that is killed does not end the others while a server has its work       [launcher]
    set up        others are training already: this rank joins them when an epoch ends            [join]
    collectives   first all live ranks meet, which leaves the dead out of the group               [meetings]
"""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_hetero import lightning_compat as compat
from lightning_hetero.glue.metrics import integer_mean_, is_mean
from lightning_hetero.stale.join import Newcomer
from lightning_hetero.stale.launcher import TolerantProcessLauncher, TolerantScriptLauncher
from lightning_hetero.stale.regroup import group_members, rebuild_default_group

if TYPE_CHECKING:
    from lightning_hetero.stale.run import StaleRun

__all__ = ["ElasticDDPStrategy"]


class ElasticDDPStrategy(DDPStrategy):
    """See the module; what is trained, and how, is a subclass's.

    Args:
        timeout, **kwargs: as in `DDPStrategy`.

    Attributes:
        newcomer: while this rank is on its way into a run of others.
    """

    def __init__(self, *, timeout: timedelta | None, **kwargs: Any) -> None:
        super().__init__(timeout=timeout, **kwargs)
        self.timeout = timeout
        self.newcomer: Newcomer | None = None
        self._run: StaleRun | None = None
        self._members: tuple[int, ...] | None = None
        self._warned: set[str] = set()

    def __getstate__(self) -> dict:
        return {**super().__getstate__(), "_run": None, "newcomer": None}

    # ---- who takes part ---------------------------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the lowest of the ranks that are left: it writes checkpoints, also when rank 0 is dead."""
        return self.global_rank == (self._members[0] if self._members else 0)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part: all, but for those that died and have not come again. Also after the fit."""
        return tuple(range(self.world_size)) if self._members is None else self._members

    @members.setter
    def members(self, members: tuple[int, ...]) -> None:
        self._members = members

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Evaluation is divided among the ranks that take part."""
        members = self.members
        return {"num_replicas": len(members), "rank": members.index(self.global_rank)}

    def warn_once(self, text: str) -> None:
        """Shows a message to people, on one rank, once."""
        if text not in self._warned:
            self._warned.add(text)
            if self.is_global_zero:  # `rank_zero_warn` would say nothing after the death of rank 0
                warnings.warn(text, RuntimeWarning, stacklevel=2)

    @property
    def _connected(self) -> StaleRun | None:
        """The run, while this rank is connected to a server."""
        run = self._run
        return run if run is not None and run.worker is not None else None

    # ---- set-up -----------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        if self._start_method == "popen":
            self._launcher = TolerantScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes, tolerates=self.goes_on_without_a_rank
            )
        else:
            self._launcher = TolerantProcessLauncher(
                self, start_method=self._start_method, tolerates=self.goes_on_without_a_rank
            )

    def goes_on_without_a_rank(self) -> bool:
        """Whether the death of a rank (not rank 0) would be survived now."""
        return self._connected is not None

    def setup_distributed(self) -> None:
        """As in the base class, unless others are training already: then this rank joins them when an epoch ends."""
        assert self.lightning_module is not None and self.cluster_environment is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING and not dist.is_initialized():
            self.set_world_ranks()
            self.newcomer = Newcomer.find(self.cluster_environment, self.global_rank)
        if self.newcomer is None:
            super().setup_distributed()
            self._members = group_members()  # fewer than all, if a rank died in an earlier fit
            return
        invitation = self.newcomer.wait()
        reset_seed()
        self.members = invitation.members
        self._process_group_backend = self._get_process_group_backend()
        rebuild_default_group(
            store=dist.TCPStore(invitation.address.host, invitation.address.port, is_master=False),
            generation=invitation.generation,
            members=invitation.members,
            rank=self.global_rank,
            backend=self._process_group_backend,
            timeout=self.timeout,
        )
        compat.resume_from(self.lightning_module.trainer, invitation.checkpoint)

    # ---- collectives ------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Within a training batch a rank's own value; at the end of an epoch the exact mean over ranks."""
        run = self._connected
        if run is not None and compat.batch_results_open(run.trainer):
            return tensor
        if not isinstance(tensor, Tensor) or self._alone:
            return tensor
        logged = "" if run is None else run.meetings.logged()
        self._meet(f"reduce {reduce_op} {tuple(tensor.shape)}{logged}")
        if is_mean(reduce_op) and not tensor.is_floating_point() and dist.is_initialized():
            world = dist.group.WORLD if group is None else group
            assert world is not None
            return integer_mean_(tensor, world)
        return super().reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Callbacks decide together, also within a batch: all ranks ask at the same one."""
        if self._alone:
            return decision
        self._meet("decision")
        value = torch.tensor(int(decision), device=self.root_device)
        value = super().reduce(value, reduce_op="sum")
        return bool(value == dist.get_world_size()) if all else bool(value)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._alone:
            return tensor.unsqueeze(0)
        self._meet(f"all_gather {tuple(tensor.shape)}")
        return super().all_gather(tensor, group, sync_grads)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._alone:
            return obj
        self._meet(f"broadcast {src}")
        return super().broadcast(obj, src)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._alone:
            return
        self._meet("barrier")
        super().barrier(*args, **kwargs)

    @property
    def _alone(self) -> bool:
        """Whether no other rank is to be waited for: this one has failed, or is on its way into a run of others."""
        run = self._connected
        return self.newcomer is not None or (run is not None and run.trainer.interrupted)

    def _meet(self, what: str) -> None:
        run = self._connected
        if run is None:
            return
        if run.loop is not None and run.loop.in_step:
            raise RuntimeError(
                f"a collective ({what}) inside training_step: ranks train different numbers of batches here, so they"
                " do not meet within one. Move it to on_train_epoch_end or validation, or use"
                " strategy='hetero_balanced'"
            )
        run.meetings.meet(what)
