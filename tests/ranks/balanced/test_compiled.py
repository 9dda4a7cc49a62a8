"""Really compiled modules: a step in which a rank compiled is nobody's speed, and ``quantum="auto"`` saves some."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero.shares.policy import ShareDecision
from lightning_hetero.types import SpeedSample
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Scripted, Toy, Weights, balanced, rank_trainer, regression, single, weights

BATCH, STEPS = 32, 8  # per rank, of 2
EXACT = 1e-12


class Compiling:
    """A backend that counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.count += 1
        return graph.forward


class Noting(Scripted):
    """Moves the shares at every whole record; notes who was measured at which step."""

    def __init__(self) -> None:
        super().__init__()
        self.measured: list[tuple[int, tuple[bool, ...]]] = []

    def _note(self, records: Sequence[SpeedSample]) -> None:
        self.measured.append((records[0].step, tuple(record.compute_s > 0 for record in records)))

    def observe(self, records: Sequence[SpeedSample]) -> ShareDecision:
        self._note(records)
        return super().observe(records)

    def take_incomplete(self, records: Sequence[SpeedSample]) -> None:
        self._note(records)
        super().take_incomplete(records)


class Steps(Callback):
    """Notes samples, and the steps in which something was compiled."""

    def __init__(self, backend: Compiling) -> None:
        self.backend, self.before = backend, 0
        self.compiled: list[int] = []
        self.samples: list[int] = []
        self.bounds: tuple[int, int] = (0, 0)  # the policy's quantum and least samples

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.before = self.backend.count
        self.samples.append(len(batch[0]))
        policy = trainer.strategy._run.policy
        self.bounds = policy.limits.quantum, min(policy.limits.lower)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.backend.count > self.before:
            self.compiled.append(batch_idx)


class Silent(Toy):
    """Logs nothing: ``self.log`` does not compile."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def fit(rank: int, world: int, *, how: dict[str, Any] | None, quantum: Any = "auto", whole: bool = False) -> Any:
    torch._dynamo.reset()
    backend, policy, module = Compiling(), Noting(), Silent()
    steps = Steps(backend)
    trained: Any = module
    if how is not None and whole:
        trained = torch.compile(module, backend=backend, **how)
    elif how is not None:
        module.net = torch.compile(module.net, backend=backend, **how)  # type: ignore[assignment]
    strategy = balanced(policy=policy, quantum=quantum)
    trainer = rank_trainer(rank, world, strategy, callbacks=[steps], max_epochs=1)
    trainer.fit(trained, DataLoader(regression(BATCH * 2 * STEPS), batch_size=BATCH, shuffle=True))
    final = Weights({name.replace("_orig_mod.", ""): value for name, value in weights(module).items()})
    return backend.count, steps, policy.measured, final


def by_size(rank: int, world: int) -> list[Any]:
    how = {"dynamic": False}
    return [fit(rank, world, how=how, quantum=1), fit(rank, world, how=how if rank else None, quantum=1)]


def test_a_step_in_which_a_rank_compiled_is_not_believed() -> None:
    expected = Toy()
    single(expected, regression(BATCH * 2 * STEPS), 2 * BATCH, max_epochs=1)
    for results in zip(*run_ranks(2, by_size), strict=True):
        compiled = [set(steps.compiled) for _, steps, _, _ in results]
        assert len(compiled[1]) >= 4  # so it did compile for each new size
        nobody = set.intersection(*compiled)  # was measured in these: then there is nothing to learn
        for _, _, measured, final in results:
            assert [step for step, _ in measured] == [step for step in range(STEPS) if step not in nobody]
            for step, ranks in measured:
                assert ranks == tuple(step not in steps for steps in compiled), step
            assert final.distance(weights(expected)) <= EXACT


class Said(logging.Handler):
    """Keeps what is told at set-up."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def quanta(rank: int, world: int) -> dict[str, tuple[int, tuple[int, int], list[int], list[str]]]:
    logger, handler = logging.getLogger("lightning.pytorch.utilities.rank_zero"), Said()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    said = handler.lines
    cases: dict[str, dict[str, Any]] = {
        "plain": {"how": None},
        "any size": {"how": {}},
        "per size": {"how": {"dynamic": False}},
        "per size, the whole module": {"how": {"dynamic": False}, "whole": True},
        "on one rank": {"how": {"dynamic": False} if rank else None},
        "as asked": {"how": {"dynamic": False}, "quantum": 2},
    }
    found = {}
    for name, case in cases.items():
        said.clear()
        count, steps, _, _ = fit(rank, world, **case)
        found[name] = count, steps.bounds, steps.samples, [line for line in said if "multiples of" in line]
    logger.removeHandler(handler)
    return found


def test_the_quantum_is_what_the_module_needs_the_same_on_all_ranks() -> None:
    ranks = run_ranks(2, quanta)
    expected = {
        "plain": (1, 8), "any size": (1, 8), "per size": (4, 8), "per size, the whole module": (4, 8),
        "on one rank": (4, 8), "as asked": (2, 8),
    }  # fmt: skip
    for rank, results in enumerate(ranks):
        assert {name: bounds for name, (_, bounds, _, _) in results.items()} == expected
        told = {name: lines for name, (_, _, _, lines) in results.items() if lines}
        assert set(told) == (set() if rank else {"per size", "per size, the whole module", "on one rank"})
        assert all("shares are multiples of 4 samples" in line for (line,) in told.values())
        for name, (quantum, _) in expected.items():
            assert all(n % quantum == 0 for n in results[name][2]), name
            assert len(set(results[name][2])) >= 4, name  # or the shares did not move
        assert results["any size"][0] <= 3  # the first size, any size, and perhaps a single sample
        assert 4 <= results["per size"][0] <= len(set(results["per size"][2]))
