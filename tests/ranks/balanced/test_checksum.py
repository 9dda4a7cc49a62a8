"""The ranks compare their parameters: what a checksum sees, who is told of a difference, and that there is none."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero.balanced.runtime.checksum import ParameterChecksum
from lightning_hetero.measure.device import device_of
from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, balanced, rank_trainer, regression

CPU = device_of("cpu")
EVERY = 3


# ---- the sum -------------------------------------------------------------------------------------------------


def parameters() -> list[Tensor]:
    """All types and layouts; one begins where no whole number of eight bytes does."""
    torch.manual_seed(0)
    last = torch.randn(2, 2, 2, 3).to(memory_format=torch.channels_last)
    return [
        torch.randn(7, 3), torch.randn(5).half(), torch.randn(2, 3).bfloat16(), torch.randn(4, 2).double(), last,
        torch.tensor(1.5), torch.randn(0, 3), torch.randn(3, dtype=torch.complex64), torch.randn(6, 4)[:, ::2],
        torch.arange(5), torch.randn(8)[1:],
    ]  # fmt: skip


def of_a_round(every: int, tensors: list[Tensor]) -> list[float]:
    checksum = ParameterChecksum(every, lambda: tensors, device=CPU)
    sums = []
    for _ in range(every):
        checksum.stepped()
        told = checksum.take()
        sums.append(-1.0 if math.isnan(told) else told)  # the last steps may have nothing left
    return sums


@pytest.mark.parametrize("every", [1, 2, 7, 40])
def test_the_highest_and_the_lowest_bit_of_every_value_are_seen(every: int) -> None:
    sound = of_a_round(every, parameters())
    assert of_a_round(every, parameters()) == sound
    assert all(-1 <= s < 2**52 and s == int(s) for s in sound)
    for which, tensor in enumerate(parameters()):
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        size = values.element_size()
        for n in range(values.numel()):
            for mask in (1, -(1 << 8 * size - 1)):
                tensors = parameters()
                broken = torch.view_as_real(tensors[which]) if tensor.is_complex() else tensors[which]
                bits = broken.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
                at = tuple(int(i) for i in torch.unravel_index(torch.tensor(n), bits.shape)) if bits.dim() else ()
                bits[at] ^= mask
                changed = of_a_round(every, tensors)
                assert sum(a != b for a, b in zip(sound, changed, strict=True)) == 1, (which, n, mask)


def test_without_a_step_there_is_nothing_to_tell_and_steps_between_add_up() -> None:
    tensors = [torch.ones(10)]
    once, twice = (ParameterChecksum(2, lambda: tensors, device=CPU) for _ in range(2))
    assert math.isnan(once.take())
    for _ in range(2):
        once.stepped()
        assert once.take() != of_a_round(1, tensors)[0]
        twice.stepped()
    assert twice.take() == of_a_round(1, tensors)[0]
    assert math.isnan(twice.take())


# ---- the ranks -----------------------------------------------------------------------------------------------


class Disturb(Callback):
    """Changes a value on rank 1 behind a step."""

    def __init__(self, rank: int, name: str, at: int) -> None:
        self.rank, self.name, self.at = rank, name, at

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.at and self.rank == 1:
            with torch.no_grad():
                value = pl_module.get_parameter(self.name).view(-1)[-1:]
                value += 1e-9 if value.dtype == torch.float64 else 0.02  # bfloat16 has two digits


class BatchReport(Callback):
    """Notes the checksums that this rank told."""

    def __init__(self) -> None:
        self.sums: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        channel = trainer.strategy._run.channel
        if batch_idx == 0:
            gather = channel.all_gather_row

            def noted(row: Any) -> Any:
                self.sums.append(row.checksum)
                return gather(row)

            channel.all_gather_row = noted


class Teacher(Toy):
    """Holds averaged weights, frozen and updated on rank 0 only, as a callback of the user's might."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Linear(3, 3).requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            self.average.weight.add_(1.0)


def fitted(rank: int, world: int, module: Toy, *callbacks: Callback, args: Any = None, **trainer: Any) -> str:
    """Returns the error of a fit, or nothing."""
    strategy = balanced(**{"check_parameters_every": EVERY, **(args or {})})
    fit = rank_trainer(rank, world, strategy, callbacks=list(callbacks), **{"max_epochs": 1, **trainer})
    dtype = module.net[0].weight.dtype
    try:
        fit.fit(module, DataLoader(regression(16 * 16, dtype=dtype), batch_size=8))
    except RuntimeError as error:
        return str(error)
    return ""


def normal(rank: int, world: int, folder: str) -> dict[str, tuple[str, list[float]]]:
    cases: dict[str, tuple[Toy, dict[str, Any]]] = {
        "plain": (Toy(), {}),
        "accumulating": (Toy(), {"accumulate_grad_batches": 3}),
        "half": (Toy(torch.bfloat16), {}),
        "equal shares": (Toy(), {"args": {"policy": None, "rebalance": False}}),
        "averaged on rank 0": (Teacher(), {}),
        "off": (Toy(), {"args": {"check_parameters_every": None}}),
    }
    results = {}
    for name, (module, how) in cases.items():
        told = BatchReport()
        results[name] = fitted(rank, world, module, told, **how), told.sums
    return results


def test_ranks_that_agree_train_on(tmp_path: Path) -> None:
    first, second = run_ranks(2, normal, str(tmp_path))
    for name, (error, sums) in first.items():
        assert error == second[name][0] == "", name
        told = [s for s in sums if not math.isnan(s)]
        assert [s for s in second[name][1] if not math.isnan(s)] == told, name
        steps = {"accumulating": 6, "off": 0}.get(name, 16)
        assert len(told) == max(0, steps - 1), name  # each but the last, after which there is no exchange
        assert len(set(told)) >= len(told) / 2, name  # they train, so the sums change


def disturbed(rank: int, world: int) -> dict[str, str]:
    return {
        "first": fitted(rank, world, Toy(), Disturb(rank, "net.0.weight", 5)),
        "last": fitted(rank, world, Toy(), Disturb(rank, "net.2.bias", 5)),
        "half": fitted(rank, world, Toy(torch.bfloat16), Disturb(rank, "net.2.bias", 5)),
        "equal shares": fitted(
            rank, world, Toy(), Disturb(rank, "net.2.bias", 5), args={"policy": None, "rebalance": False}
        ),
        "not looked for": fitted(
            rank, world, Toy(), Disturb(rank, "net.2.bias", 5), args={"check_parameters_every": None}
        ),
    }


def test_a_value_that_differs_is_found_within_the_steps_of_a_round() -> None:
    for errors in run_ranks(2, disturbed):
        assert errors.pop("not looked for") == ""
        for name, error in errors.items():
            assert error.startswith("the parameters of rank 0 and of rank 1 differ"), (name, error)
            found = re.search(r"epoch 0, step (\d+)", error)
            assert found is not None
            # Changed behind step 5, summed after the optimizer step of one of the next EVERY, told with the next batch.
            assert 6 < int(found[1]) <= 6 + EVERY, name


def resumed(rank: int, world: int, folder: str) -> list[str]:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 4:
                trainer.save_checkpoint(f"{folder}/at-4.ckpt")

    errors = [fitted(rank, world, Toy(), Save())]
    for callbacks in ([], [Disturb(rank, "net.2.bias", 8)]):
        strategy = balanced(check_parameters_every=EVERY)
        trainer = rank_trainer(rank, world, strategy, callbacks=callbacks, max_epochs=1)
        try:
            trainer.fit(Toy(), DataLoader(regression(16 * 16), batch_size=8), ckpt_path=f"{folder}/at-4.ckpt")
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def test_a_resumed_run_begins_a_round_on_all_ranks(tmp_path: Path) -> None:
    for uninterrupted, sound, broken in run_ranks(2, resumed, str(tmp_path)):
        assert uninterrupted == sound == ""
        assert "the parameters of rank 0 and of rank 1 differ" in broken
