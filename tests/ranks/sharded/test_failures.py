"""One rank of a sharded run is killed or raises, wherever: all others end with the cause, and none hangs."""

from __future__ import annotations

import os
import signal
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

from lightning_hetero.base.checks import naming_damage
from lightning_hetero.lightning_compat.strategies import read_folder
from tests.ranks.harness import process_context
from tests.ranks.kit import rank_trainer
from tests.ranks.resume_kit import loader
from tests.ranks.sharded.checkpoint_kit import SAMPLES, Sharded, strategy

pytestmark = pytest.mark.ranks
WORLD, CAUSE = 3, "a flux compensator broke"
TIMEOUT_S = 60.0


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Failing(Sharded):
    """Dies, or raises, in its fourth batch; in the second of its checkpoints, whose shard it has written."""

    place = ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.place == "forward":
            self.net[2].register_forward_hook(die)
        if batch_idx == 3 and self.place == "backward":
            self.net[2].register_full_backward_hook(die)
        if batch_idx == 3 and self.place == "raises":
            raise ValueError(CAUSE)
        if batch_idx == 3 and self.place == "saving":
            writer: Any = FileSystemWriter
            write = writer.write_data

            def written(*args: Any) -> Any:
                write(*args)
                die()

            writer.write_data = written
        return super().training_step(batch, batch_idx)


def fit(rank: int, place: str, target: int, folder: str) -> None:
    """Trains in a process of its own, which ends as it likes; what is on its screen goes into a file as well."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.chdir(folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", Path(folder, "meet").as_uri(), rank=rank, world_size=WORLD)
    module = Failing()
    module.place = place if rank == target else ""
    saver = ModelCheckpoint(folder, "it", every_n_train_steps=2, enable_version_counter=False)
    how = strategy("folder", WORLD, timeout=timedelta(seconds=TIMEOUT_S))
    trainer = rank_trainer(rank, WORLD, how, max_epochs=1, enable_checkpointing=True, callbacks=[saver])
    try:
        trainer.fit(module, loader(4, samples=SAMPLES))
    except BaseException as error:
        Path(folder, f"screen-{rank}").write_text("".join(traceback.format_exception(error)))
        raise
    Path(folder, f"screen-{rank}").write_text("finished")


@pytest.mark.parametrize(
    ("place", "target"),
    [
        ("backward", 0), ("saving", 1), ("raises", 2),
        pytest.param("forward", 1, marks=pytest.mark.long), pytest.param("", 0, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_all_ranks_end_with_the_cause(tmp_path: Path, place: str, target: int) -> None:
    processes = [process_context().Process(target=fit, args=(r, place, target, str(tmp_path))) for r in range(WORLD)]
    for process in processes:
        process.start()
    codes = {}
    for rank, process in enumerate(processes):
        process.join(TIMEOUT_S)
        codes[rank] = process.exitcode
        process.kill()
        process.join()
    said = {int(path.name.partition("-")[2]): path.read_text() for path in tmp_path.glob("screen-*")}
    if not place:
        assert codes == dict.fromkeys(range(WORLD), 0) and set(said.values()) == {"finished"}
        return
    assert None not in codes.values() and 0 not in codes.values(), codes
    for rank in {*range(WORLD)} - {target}:
        words = f"rank {target} failed: ValueError: {CAUSE}" if place == "raises" else f"rank {target} is gone without"
        assert words in said[rank], said[rank]
    assert place != "raises" or CAUSE in said[target].splitlines()[-1]
    with naming_damage(tmp_path / "it.ckpt"):
        assert read_folder(tmp_path / "it.ckpt")["global_step"] == 2
