"""A checkpoint whose file is damaged is an error that names it, before anything is trained on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tests.ranks.harness import run_ranks
from tests.ranks.kit import Toy, rank_trainer, regression
from tests.ranks.strangers.kit import strategy

pytestmark = pytest.mark.ranks


def damaged(path: Path, how: str) -> None:
    """Does to a file what disks and networks do."""
    whole = path.read_bytes()
    if how == "flipped":
        place = whole.index(torch.full((1, 64), 0.125).numpy().tobytes())  # of the parameters
        whole = whole[:place] + bytes(255 - byte for byte in whole[place : place + 8]) + whole[place + 8 :]
    path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "text": b"no checkpoint"}.get(how, whole))


class Marked(Toy):
    """Has bytes that are easily found in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mark", torch.full((1, 64), 0.125))


def fitted(rank: int, world: int, engine: str, epochs: int, read: str | None, written: str | None) -> int:
    fits = rank_trainer(rank, world, strategy(engine, pipeline={"backbone": "net"}), max_epochs=epochs)
    fits.fit(Marked(), DataLoader(regression(16), batch_size=4), ckpt_path=read)
    if written is not None:
        fits.save_checkpoint(written)
    return fits.global_step


@pytest.mark.parametrize(
    ("engine", "how", "words"),
    [
        ("balanced", "flipped", "are not those that were written"),
        ("pipeline", "flipped", "are not those that were written"),
        ("balanced", "cut", "cannot be read: "),
        ("stale", "empty", r"\(0 bytes\) cannot be read: EOFError"),
        ("balanced", "text", r"\(13 bytes\) cannot be read: "),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, engine: str, how: str, words: str) -> None:
    path = tmp_path / "last.ckpt"
    run_ranks(2, fitted, engine, 1, None, str(path))
    if how == "flipped":
        assert run_ranks(2, fitted, engine, 2, str(path), None) == [4, 4]
    damaged(path, how)
    with pytest.raises(RuntimeError, match=f"the checkpoint {path} .*{words}"):
        run_ranks(2, fitted, engine, 2, str(path), None)
