"""`ElasticDDPStrategy`: DDP among ranks of which one may die, or come again, while the others train on (layer L).

    launch        a rank that is killed does not end the others while they can do without it      [lightning_compat]
    set up        others are training already: this rank joins them, and they say when            [join]
    collectives   first all live ranks meet, which leaves the dead out of the group               [meetings]
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

from lightning_hetero import lightning_compat as compat
from lightning_hetero.base.ddp import HeteroDDPStrategy
from lightning_hetero.base.elastic.coming import Coming
from lightning_hetero.base.elastic.join import Invitation, JoiningRank
from lightning_hetero.base.elastic.meetings import Meetings
from lightning_hetero.base.elastic.members import Members
from lightning_hetero.base.nodes import gather_nodes
from lightning_hetero.base.run import EngineRun
from lightning_hetero.transport.groups import group_members, rebuild_default_group

Run = TypeVar("Run", bound=EngineRun[Any])
T = TypeVar("T")


class ElasticDDPStrategy(HeteroDDPStrategy[Run]):
    """See the module; what is trained, and how, is a subclass's: `_meetings` and `_in_step` are for it to say.
    """

    def __init__(self, **ddp: Any) -> None:
        super().__init__(**ddp)
        self._members: Members | None = None  # from `setup_distributed` on, also after the fit
        self._joining_rank: JoiningRank | None = None  # this rank, on its way into a run of others
        self.invitation: Invitation | None = None  # into that run

    @property
    def _meetings(self) -> Meetings | None:
        """Where the ranks meet, while they train and one may be lost."""
        clients: Any = getattr(self._run, "clients", None)
        return clients if clients is not None and clients.open else None

    def _in_step(self) -> bool:
        """Whether this rank is training on a batch, in which the others may have no part."""
        return False

    def can_lose_ranks(self) -> bool:
        """Also whether the others let a rank in that comes late, or again."""
        return True

    # ---- who takes part ---------------------------------------------------------------------------------------

    @property
    def members(self) -> Members:
        """The ranks that take part; known once ranks are."""
        here = self.global_rank, self.world_size
        if self._members is None or (self._members.rank, self._members.world_size) != here:
            self._members = Members(*here)
        return self._members

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the lowest of the ranks that are left: it writes checkpoints, also when rank 0 is dead."""
        return self.global_rank == (0 if self._members is None else self._members.lowest)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Evaluation is divided among the ranks that take part."""
        alive = self.members.alive
        return {"num_replicas": len(alive), "rank": alive.index(self.global_rank)}

    def host_name(self) -> str:
        """Returns the name under which other nodes reach this one; once `Members.nodes` is known."""
        if self.num_nodes == 1 and len(set(self.members.nodes.values())) == 1:
            return "127.0.0.1"
        if not self.members.shares_node_with(0):  # which matters if rank 0 has died
            return socket.gethostname()
        assert self.cluster_environment is not None
        return self.cluster_environment.main_address

    def find_nodes(self) -> None:
        """Notes on which node each member is; a collective of the members; a joining rank knows it already."""
        members, invitation = self.members, self.invitation
        if invitation is None:
            members.nodes = dict(zip(members.alive, gather_nodes(self.node_rank), strict=True))
        else:
            members.nodes = {**dict(invitation.nodes), members.rank: self.node_rank}

    # ---- set-up -----------------------------------------------------------------------------------------------

    def goes_on_without_a_rank(self) -> bool:
        """Whether the death of a rank (not rank 0) would be survived now."""
        return self._meetings is not None

    def setup_distributed(self) -> None:
        """As in the base class, unless others are training already: then this rank joins them when an epoch ends."""
        assert self.cluster_environment is not None
        trainer, joining_rank = self._attached_trainer(), None
        self.set_world_ranks()
        fits_with_others = trainer is not None and trainer.state.fn == TrainerFn.FITTING and self.world_size > 1
        if fits_with_others and self.can_lose_ranks() and not dist.is_initialized():
            joining_rank = JoiningRank.find(self.cluster_environment, self.global_rank)
        if joining_rank is None:
            super().setup_distributed()
            left = group_members()  # fewer than all, if a rank died in an earlier fit
            self.members.alive = tuple(range(self.world_size)) if left is None else left
            self.members.joining, self.invitation = False, None
            return
        self.members.joining, self._joining_rank = True, joining_rank
        self.invitation = joining_rank.come(self._join_group)
        reset_seed()
        assert trainer is not None
        compat.resume_from(trainer, self.invitation.checkpoint)

    def _join_group(self, invitation: Invitation, store: dist.Store, coming: Coming) -> None:
        self.members.alive = invitation.members
        rebuild_default_group(
            store=store, generation=invitation.generation, members=invitation.members, rank=self.global_rank,
            backend=self.choose_backend(), timeout=self.timeout, living=lambda: coming.living(invitation.members),
        )  # fmt: skip

    def share_start(self, model: nn.Module) -> None:
        """Gives all ranks rank 0's parameters and buffers, as DDP does; a joining rank has those of its checkpoint."""
        if self.members.joining:
            return
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, 0)

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._run is not None:
            self._run.start()
        self._has_come()

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._run is not None:
            self._run.finish()

    def teardown(self) -> None:
        self._has_come()  # or never will
        super().teardown()

    def _has_come(self) -> None:
        joining_rank, self._joining_rank = self._joining_rank, None
        if joining_rank is not None:
            joining_rank.trains()

    # ---- collectives ------------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Within a training batch a rank's own value; at the end of an epoch the exact mean over ranks."""
        meetings = self._meetings
        if meetings is not None and compat.batch_results_open(meetings.trainer):
            return tensor
        if not isinstance(tensor, Tensor) or self._alone:
            return tensor
        logged, base = "" if meetings is None else meetings.logged(), super().reduce

        def reduced() -> Any:
            return base(tensor if meetings is None else tensor.clone(), group, reduce_op)

        return self._together(f"reduce {reduce_op} {tuple(tensor.shape)}{logged}", reduced)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Callbacks decide together, also within a batch: all ranks ask at the same one."""
        if self._alone:
            return decision
        base = super().reduce

        def decided() -> bool:
            value = base(torch.tensor(int(decision), device=self.root_device), reduce_op="sum")
            return bool(value == dist.get_world_size()) if all else bool(value)

        return self._together("decision", decided)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._alone:
            return tensor.unsqueeze(0)
        base = super().all_gather
        return self._together(f"all_gather, {tensor.dim()} dimensions", lambda: base(tensor, group, sync_grads))

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._alone:
            return obj
        base = super().broadcast
        return self._together(f"broadcast {src}", lambda: base(obj, src))

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._alone:
            return
        base = super().barrier
        self._together("barrier", lambda: base(*args, **kwargs))

    @property
    def _alone(self) -> bool:
        """Whether no other rank is to be waited for: this one has failed, or is on its way into a run of others."""
        if self._members is not None and self._members.joining:
            return True
        meetings = self._meetings
        return meetings is not None and meetings.trainer.interrupted

    def _together(self, what: str, collective: Callable[[], T]) -> T:
        meetings = self._meetings
        if meetings is None:
            return collective()
        if self._in_step():
            raise RuntimeError(
                f"a collective ({what}) inside training_step, in which ranks do not meet where one may be lost or train"
                " on fewer batches. Move it to on_train_epoch_end or validation, or use strategy='hetero_balanced'"
                " without min_ranks"
            )
        with self.waiting_for_peers():
            return meetings.together(what, collective)
