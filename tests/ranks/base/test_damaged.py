"""A checkpoint whose file is damaged is an error that names it, before anything is trained on it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hetero.base.checks import naming_damage
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
        ("federated", "flipped", "are not those that were written"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, engine: str, how: str, words: str) -> None:
    path = tmp_path / "last.ckpt"
    run_ranks(2, fitted, engine, 1, None, str(path))
    if how == "flipped":
        assert run_ranks(2, fitted, engine, 2, str(path), None) in ([4, 4], [8, 8])  # each client's own data
    damaged(path, how)
    with pytest.raises(RuntimeError, match=f"the checkpoint {path} .*{words}"):
        run_ranks(2, fitted, engine, 2, str(path), None)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("how", ["cut", "flipped", "zeroed", "noise"])
def test_whatever_has_happened_to_a_file_it_is_whole_or_named(tmp_path: Path, how: str, weights_only: bool) -> None:
    path, draw = tmp_path / "last.ckpt", random.Random(how)
    saved = {"state_dict": {"weight": torch.arange(400.0)}, "epoch": 3, "callbacks": {"a": [1, 2]}}
    torch.save(saved, path)
    whole = path.read_bytes()
    for _ in range(40):
        data, place = bytearray(whole), draw.randrange(len(whole))
        match how:
            case "cut":
                del data[place:]
            case "flipped":
                data[place] ^= 1 << draw.randrange(8)
            case "zeroed":
                data[place : place + 512] = bytes(len(data[place : place + 512]))
            case _:
                data = bytearray(draw.randbytes(1 + place % 100))
        path.write_bytes(data)
        try:
            with naming_damage(path):
                found = torch.load(path, map_location="cpu", weights_only=weights_only)
        except RuntimeError as error:
            assert f"the checkpoint {path} ({len(data)} bytes) cannot be read: " in str(error)
            assert "resume from an earlier one" in str(error)
        else:
            torch.testing.assert_close(found, saved, rtol=0.0, atol=0.0)


def test_an_error_that_is_not_the_files_stays_as_it_is(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, path := tmp_path / "last.ckpt")
    with pytest.raises(TypeError, match="a user's hook"), naming_damage(path):
        raise TypeError("a user's hook")
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(OSError, match=str(place)), naming_damage(place):
            torch.load(place)
