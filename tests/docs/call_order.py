"""``python -m tests.docs.call_order [--all ENGINE]``: the orders of calls on docs/reference/architecture.md, traced.

Two ranks train a small model; what rank 0 calls in one steady batch, on its training thread, is taken down. `STOPS` has
what a reader should find of hundreds of calls, and says what happens there; their order, and that they are called at
all, is the trace's. ``--all`` prints every function in the order of its first call.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_hetero
from lightning_hetero import BoundedStalenessStrategy, FederatedStrategy, HeteroPipelineStrategy, LoadBalancedStrategy
from tests.docs.kit import REFERENCE
from tests.ranks.harness import RankEnvironment, run_ranks

PACKAGE = Path(lightning_hetero.__file__).resolve().parent
OURS = f"{PACKAGE}{os.sep}"
PAGE = REFERENCE / "architecture.md"
STEADY, TRIES = 20, 8  # batches before anything is taken down, and trainings at most
PLAN = {"groups": [{"ranks": [0, 1], "cuts": [0, 3, 6], "samples": 32, "micro_batches": [8, 8, 8, 8]}]}
STRATEGIES = {
    "balanced": LoadBalancedStrategy,
    "stale": BoundedStalenessStrategy,
    "pipeline": partial(HeteroPipelineStrategy, backbone="model", plan=PLAN),
    "federated": partial(FederatedStrategy, local_steps=4),
}
STOPS: dict[str, dict[str, str]] = {
    "balanced": {
        "data/batches.py:GlobalBatchSampler.__iter__": "which samples are the global batch, whatever the shares",
        "balanced/fit/loaders.py:BalancedBinder.split": "the shares of this batch are asked for",
        "balanced/decide/controller.py:ShareController.full_shares": "as last decided; a surprise decides now",
        "balanced/fit/balancing_strategy.py:BalancingStrategy.batch_to_device": "the batch is on its device",
        "balanced/fit/loaders.py:BalancedBinder.open": "which part of which global batch it is",
        "balanced/runtime/pieces.py:LossWeight.open": "its weight W n / N",
        "balanced/fit/balancing_strategy.py:BalancingStrategy.training_step": "the user's step, in pieces if need be",
        "balanced/runtime/pieces.py:LossWeight.factor": "the loss is weighted before backward",
        "measure/step_clock.py:StepProbe.backward_ended": "own gradients are complete: the stopwatch stops",
        "balanced/decide/controller.py:ShareController.measured": "the record is sent; no rank waits for it",
        "measure/step_clock.py:StepProbe.updating": "the optimizer steps",
    },
    "stale": {
        "stale/fit/global_steps.py:GlobalSteps.claim": "Lightning asks for a batch: samples are claimed",
        "stale/runtime/work/worker.py:Worker.claim": "the request, and the server's answer: an assignment, or none",
        "stale/runtime/work/worker.py:Worker.pull": "the parameters of the version it was assigned",
        "data/assigned.py:SampleSource.batch": "a batch of the samples assigned",
        "stale/fit/step_loop.py:StepLoop.opened": "what its samples weigh",
        "stale/strategy.py:BoundedStalenessStrategy.training_step": "the user's step",
        "stale/fit/step_loop.py:StepLoop.backward_done": "gradients are complete",
        "stale/fit/step_loop.py:StepLoop.stepped": "the user's optimizer would step: a push instead",
        "stale/runtime/work/gradient_writer.py:GradientWriter.write": "gradients go into the rank's slot",
        "stale/runtime/work/worker.py:Worker.push": "the server gets it, and answers with the next assignment",
        "stale/fit/step_loop.py:StepLoop._top_up": "as long as it is one of the same step, that is computed, too",
        "stale/fit/global_steps.py:GlobalSteps.over": "the global step is over on this rank",
    },
    "pipeline": {
        "pipeline/fit/loaders.py:PipelineBinder.split": "samples per group, by the plan",
        "pipeline/fit/training.py:TrainBatches.open": "what rank 0 has decided begins here",
        "pipeline/fit/loaders.py:PipelineBinder.micro_batches": "the leader's part is cut",
        "pipeline/runtime/execute/stage_runner.py:StageRunner.train": "the schedule's operations begin",
        "pipeline/runtime/step/resumable.py:ResumableStep.start": "a training step runs in a greenlet",
        "pipeline/runtime/step/resumable.py:ResumableStep.suspend": "it has called the backbone, and is suspended",
        "pipeline/runtime/execute/stages.py:Stage.forward": "this rank's layers",
        "pipeline/runtime/execute/stage_links.py:StageLinks.send": "activations go to the next stage",
        "pipeline/runtime/execute/stage_links.py:StageLinks.receive": "the last stage's output comes back",
        "pipeline/runtime/execute/stages.py:Flight.backward": "gradients of a micro-batch, through this rank's layers",
        "pipeline/runtime/ownership/gradients.py:GradientSync.launch": "sums over the ranks that hold the same begin",
        "pipeline/fit/logs.py:StepLogs.send": "what was logged and measured, once for all micro-batches",
    },
    "federated": {
        "federated/fit/rounds.py:Rounds.plan": "what the policy has decided for this round",
        "federated/runtime/own.py:OwnOrder.items": "samples of the rank's own data",
        "federated/strategy.py:FederatedStrategy.training_step": "the user's step",
        "federated/fit/run.py:FederatedRun.pull": "FedProx: towards the last average",
        "federated/fit/local_steps.py:LocalSteps.end": "own work is known",
        "federated/decide/rounds.py:Course.ends_round": "after the round's last step ranks meet",
        "federated/fit/averaging.py:Averaging.meet": "who is there, and what each has measured",
        "federated/runtime/averaging.py:average_": "the weighted average of parameters",
        "federated/runtime/averaging.py:average_states_": "and of the optimizers' state",
        "federated/fit/rounds.py:Rounds.next": "the next round is decided",
        "federated/fit/averaging.py:Averaging.remember": "where the next round starts from",
    },
}
"""{engine: {"file:function": what happens there}}, twelve each."""


class Model(LightningModule):
    """Six layers and a head, so that two stages have three layers each."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
        self.head = nn.Linear(16, 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.head(self.model(x)), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Recorder(Callback):
    """Takes down the functions of ours that are called in each batch, in the order of their first calls."""

    def __init__(self) -> None:
        self.batches: list[dict[str, None]] = []

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            name = getattr(frame.f_code, "co_qualname", frame.f_code.co_name).replace("<locals>.", "")
            self.batches[-1].setdefault(f"{Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()}:{name}")

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] >= STEADY:
            self.batches.append({})
            sys.setprofile(self._profile)

    def on_train_epoch_end(self, *args: Any) -> None:
        sys.setprofile(None)


def fit(rank: int, world_size: int, engine: str) -> list[list[str]]:
    """Trains for some batches; returns what this rank has called in each."""
    recorder = Recorder()
    rows = 16 * (STEADY + 12) * (1 if engine == "federated" else world_size)
    data = TensorDataset(torch.randn(rows, 16), torch.randn(rows, 1))
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=STRATEGIES[engine](), max_epochs=1, callbacks=[recorder],
        plugins=[RankEnvironment(rank, world_size)], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(data, batch_size=16))
    return [list(batch) for batch in recorder.batches]


def traced(engine: str) -> list[str]:
    """Returns "file:function" of all that rank 0 calls in one batch, in the order of the first calls.

    It is one with all of the engine's stops, in the order that most such batches have: a rank may have no part in a
    batch, a round may go on, or an answer may come late. On a busy machine the other rank may be the faster one
    throughout, so that there are several tries.

    Raises:
        ValueError: no batch has them.
    """
    stops, missed = set(STOPS[engine]), set[str]()
    for _ in range(TRIES):
        batches = run_ranks(2, fit, engine)[0]
        if found := [batch for batch in batches if stops <= set(batch)]:
            orders = Counter(tuple(call for call in batch if call in stops) for batch in found)
            usual = orders.most_common(1)[0][0]
            return next(batch for batch in found if tuple(call for call in batch if call in stops) == usual)
        missed = stops - {call for batch in batches for call in batch}
    raise ValueError(f"{engine} does not call {sorted(missed)}, or not in one batch")


def lines(engine: str) -> str:
    """Returns an engine's stops in the order of the trace."""
    found = [(*call.partition(":"), STOPS[engine][call]) for call in traced(engine) if call in STOPS[engine]]
    return "\n".join(f"{n}. `{file}` `{name}`: {what}." for n, (file, _, name, what) in enumerate(found, 1))


def page_with(engine: str, page: str) -> str:
    """Returns a page's text with the engine's order of calls in the place of its own."""
    mark = rf"(<!-- calls {engine}: python -m tests\.docs\.call_order -->\n).*?(\n<!-- end -->)"
    text = lines(engine)
    page, count = re.subn(mark, lambda found: f"{found[1]}\n{text}\n{found[2]}", page, flags=re.S)
    assert count == 1, f"{PAGE.name} has no mark for {engine}"
    return page


if __name__ == "__main__":
    if "--all" in sys.argv:
        print("\n".join(traced(sys.argv[-1])))
    else:
        for name in STOPS:
            PAGE.write_text(page_with(name, PAGE.read_text()))
