"""Behind a fit: the module is whole on every rank, and the Trainer and everybody else goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from tests.ranks.harness import run_ranks
from tests.ranks.kit import Weights, quiet_trainer, rank_trainer, regression, weights
from tests.ranks.pipeline.kit import WORLD, Deep, pipeline
from tests.ranks.pipeline.resume_kit import BATCH, EXACT, differences, train, validate
from tests.ranks.resume_kit import Saver

PREDICTED = 20  # samples


class Full(Deep):
    """With everything that a Trainer can run; keeps the optimizers it has made."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.model(self.before(batch[0])))


def whole(module: Deep) -> list[str]:
    """What is wrong with a module behind a fit."""
    wrong = [f"{n} on {p.device}" for n, p in module.named_parameters() if p.device.type != "cpu"]
    wrong += [f"{n} is a {type(p).__name__}" for n, p in module.named_parameters() if type(p) is not torch.nn.Parameter]
    wrong += [f"{n} needs {p.requires_grad}" for n, p in module.named_parameters() if not p.requires_grad]
    wrong += [name for name in ("_apply", "log", "log_dict", "state_dict") if name in vars(module)]
    wrong += [type(m).__name__ for m in module.modules() if "forward" in vars(m)]
    return wrong


def tour(trainer: Trainer, module: Full, loader: DataLoader, folder: str) -> tuple[list[Any], list[Weights], list[str]]:
    """Everything that one Trainer can be asked for, in turn."""
    values: list[Any] = [trainer.validate(module, validate(), verbose=False)[0]["val"]]
    ends, wrong = [weights(module)], whole(module)
    trainer.fit(module, loader, validate())
    ends.append(weights(module))
    wrong += whole(module)
    values.append(trainer.validate(module, validate(), verbose=False)[0]["val"])
    values.append(trainer.test(module, validate(), verbose=False)[0]["test"])
    predicted = trainer.predict(module, validate())
    values.append(sum(len(p) for p in predicted or () if p is not None))  # a member has none
    trainer.save_checkpoint(f"{folder}/between.ckpt")  # behind evaluations: of the fit before them
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader, validate())
    ends.append(weights(module))
    trainer.save_checkpoint(f"{folder}/end.ckpt")
    values += [trainer.global_step, float(trainer.callback_metrics["val"])]
    x = regression(7, seed=5).tensors[0]
    with torch.no_grad():
        values.append(module.predict_step([x], 0).sum().item())
    return values, ends, wrong + whole(module)


def tour_job(rank: int, world: int, plan: str, folder: str) -> dict[str, Any]:
    module, strategy = Full(), pipeline(plan)
    trainer = rank_trainer(rank, world, strategy, max_epochs=1, callbacks=[Saver(folder, [])])
    values, ends, wrong = tour(trainer, module, train(BATCH // world), folder)
    second = rank_trainer(rank, world, pipeline(plan), max_epochs=1)  # another Trainer goes on with the same module
    second.fit(module, train(BATCH // world))
    loss = module.loss(next(iter(validate())))
    loss.backward()  # and so may anybody else
    complete = all(p.grad is not None for p in module.parameters())
    from_file = rank_trainer(rank, world, pipeline(plan)).validate(
        Full(), validate(), ckpt_path=f"{folder}/between.ckpt", verbose=False
    )
    held = [o for o in trainer.optimizers if any(s["exp_avg"].is_meta for s in o.state.values())]
    return {"values": values, "ends": [*ends, weights(module)], "wrong": wrong + whole(module) + held,
            "complete": complete, "from file": from_file[0]["val"]}  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], list[Weights], Path]:
    """What one process found, its weights after each fit, and where its checkpoints are."""
    data, module, folder = regression(96), Full(), tmp_path_factory.mktemp("one")
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=0)  # type: ignore[arg-type]
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    trainer = quiet_trainer(devices=1, max_epochs=1, callbacks=[Saver(str(folder), [])])
    with pytest.warns(UserWarning):
        values, ends, wrong = tour(trainer, module, loader, str(folder))
        quiet_trainer(devices=1, max_epochs=1).fit(module, loader)
    assert wrong == []
    return values, [*ends, weights(module)], folder


@pytest.mark.stock_ddp("entry_points", "pipeline")
@pytest.mark.parametrize("plan", ["1x2", "2x2"])
@pytest.mark.short("2x2")
def test_one_trainer_does_everything_in_turn_and_leaves_the_module_whole(
    plan: str, tmp_path: Path, alone: tuple[list[Any], list[Weights], Path]
) -> None:
    values, ends, folder = alone
    ranks = run_ranks(WORLD[plan], tour_job, plan, str(tmp_path), timeout_s=100.0)
    for found in ranks:
        assert found["wrong"] == [] and found["complete"]
        for ours, theirs in zip(found["ends"], ends, strict=True):
            assert ours.distance(theirs) <= EXACT
        assert found["values"][:3] == pytest.approx(values[:3], rel=1e-6)
        assert found["values"][4:] == pytest.approx(values[4:], rel=1e-6)
        assert found["from file"] == pytest.approx(found["values"][1], rel=1e-9)
    # Each group's leader has the predictions of its group's samples.
    each = sorted(found["values"][3] for found in ranks)
    assert sum(each) == PREDICTED
    for name in ("between.ckpt", "end.ckpt", "val-0.ckpt", "val-6.ckpt"):  # the last two in an evaluation
        ours, stock = (torch.load(where / name, weights_only=True) for where in (tmp_path, folder))
        assert name == "val-0.ckpt" or ours.pop("lightning_hetero")["engine"] == "pipeline"
        for loops in (ours.pop("loops"), stock.pop("loops")):
            assert loops.keys() == {"fit_loop", "validate_loop", "test_loop", "predict_loop"}
        assert differences(ours, stock) == [], name
