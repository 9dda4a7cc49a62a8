"""Refusals with a reason, and error messages that name the cause (layer L).

In which numbers a Trainer computes, and whether the device can.
"""

from __future__ import annotations

import difflib
import inspect
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.plugins.precision import Precision
from torch.distributed.checkpoint import CheckpointException

from lightning_hetero.lightning_compat.strategies import written_last
from lightning_hetero.measure.device import device_of
from lightning_hetero.transport.failures import FailureBoard, lost_contact

REFUSALS = {
    "lightning.fabric": "lightning_hetero's strategies divide the Trainer's batches and have no counterpart in Fabric,"
    " whose training loop is the user's own; use lightning.pytorch.Trainer(strategy=...), or Fabric(strategy='ddp')",
    "pytorch_lightning": "this program uses the package pytorch_lightning, whose Trainer knows nothing of"
    " lightning.pytorch's strategies: the two packages are copies of the same code. Import lightning.pytorch instead of"
    " pytorch_lightning",
}
"""By package, why our names in its registry make nothing there."""


def check_counts(**counts: int | None) -> None:
    """Checks arguments that count something; None: not given.

    Raises:
        ValueError: one is not a whole number >= 1.
    """
    for name, value in counts.items():
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r} must be a whole number >= 1")


def check_choice(name: str, value: object, allowed: Sequence[object], *, why: str = "") -> None:
    """Checks an argument that has few possible values; ``why`` others have no meaning.

    Raises:
        ValueError: it is not one of them.
    """
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {allowed}{why}")


def check_flags(**flags: bool) -> None:
    """Checks arguments that are true or false.

    Raises:
        ValueError: one is something else, e.g. the word ``"no"``.
    """
    for name, value in flags.items():
        check_choice(name, value, (True, False))


def check_controller(given: Any) -> Any:
    """Checks the argument ``controller``; returns it.

    Raises:
        TypeError: it is neither a known word, nor None, nor what starts a controller.
    """
    if given is None or given == "lyapunov" or callable(getattr(given, "start", None)):
        return given
    raise TypeError(
        f"controller={given!r} must be 'lyapunov', None, or a LyapunovController(...), whose arguments are its settings"
    )


def known_arguments(*classes: type) -> set[str]:
    """Returns the names of what these classes are made with."""
    return {n for c in classes for n in inspect.signature(c.__init__).parameters} - {"self", "kwargs", "module"}


def check_arguments(given: Mapping[str, Any], strategy: type, *stock: type) -> None:
    """Refuses what neither a strategy knows nor the classes that it passes arguments on to.

    Args:
        given: what the strategy would pass on.
        strategy: class of the strategy, whose own arguments may be meant.
        stock: those classes.

    Raises:
        TypeError: an unknown argument; names the nearest known one.
    """
    known = known_arguments(*stock)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known | known_arguments(strategy)), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{strategy.__name__} and {stock[-1].__name__} have no argument {name!r}{hint}")


def check_averaging(kwargs: Mapping[str, Any], ddp_comm_state: object | None) -> None:
    """Refuses what cannot hold when ranks train on batches of different sizes.

    Args:
        kwargs: arguments of `DDPStrategy`.
        ddp_comm_state: as in `DDPStrategy`.

    Raises:
        TypeError: post-localSGD, which lets ranks drift apart.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

    if kwargs.get("model_averaging_period") is not None or isinstance(ddp_comm_state, PostLocalSGDState):
        raise TypeError(
            "post-localSGD lets the ranks' weights drift apart between averages, and an unweighted average of ranks"
            " with unequal batches is biased; drop model_averaging_period, or use strategy='ddp'"
        )


def check_same_settings(everyone: Sequence[Mapping[str, str]]) -> None:
    """Compares what all ranks were configured with.

    Raises:
        ValueError: ranks differ; names the setting and each rank's value.
    """
    for name in everyone[0] if everyone else ():
        values = {rank: settings.get(name) for rank, settings in enumerate(everyone)}
        if len(set(values.values())) > 1:
            raise ValueError(
                f"the ranks are configured differently: {name} is {values}. Start every rank with the same program,"
                " arguments and package versions"
            )


@contextmanager
def naming_damage(path: Any) -> Iterator[None]:
    """Inside, a checkpoint is loaded: of one that is damaged the path is named, and what is wrong.

    Torch does not compare the sums that it has written; bytes that have changed would be trained on. The ranks divide
    the parts of a distributed checkpoint, which is a folder.

    Raises:
        RuntimeError: the file, or the folder, cannot be read.
    """
    size = f"{os.path.getsize(path)} bytes" if os.path.isfile(path) else "a folder" if any(_ends(path)) else None
    as_written = False  # then an error that torch does not raise for a file is not the file's
    try:
        if size is not None and torch.serialization.get_crc32_options():
            parts = [path] if os.path.isfile(path) else _parts(Path(path))
            as_written = any([_check_sums(part) for part in parts if zipfile.is_zipfile(part)])
        yield
    except (Exception, CheckpointException) as error:
        cause = _first_of(error)
        of_files = isinstance(cause, OSError | EOFError | KeyError | RuntimeError | pickle.UnpicklingError)
        if size is None or isinstance(error, FileNotFoundError | PermissionError) or (as_written and not of_files):
            raise
        raise RuntimeError(
            f"the checkpoint {path} ({size}) cannot be read: {type(cause).__name__}: {cause}. If it is damaged,"
            " resume from an earlier one"
        ) from error


def _check_sums(part: Any) -> bool:
    with zipfile.ZipFile(part) as file:
        if (name := file.testzip()) is not None:
            raise zipfile.BadZipFile(f"the bytes of {name} are not those that were written")
    return True


def _ends(folder: Any) -> tuple[bool, bool]:
    """Returns which of the two files are there that end a distributed checkpoint."""
    return Path(folder, ".metadata").is_file(), written_last(folder).is_file()


def _parts(folder: Path) -> Iterator[BytesIO]:
    """Yields this rank's share of what a distributed checkpoint has in files."""
    if not all(ends := _ends(folder)):
        missing = written_last(folder).name if ends[0] else ".metadata"
        raise EOFError(f"it has no {missing}, so saving has not come to its end")
    group = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    for part in list(dcp.FileSystemReader(folder).read_metadata().storage_data.values())[group[0] :: group[1]]:
        with open(folder / part.relative_path, "rb") as file:
            file.seek(part.offset)
            yield BytesIO(file.read(part.length))


def _first_of(error: BaseException) -> BaseException:
    """Returns what has failed on the first of the ranks that read or write a distributed checkpoint together."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    return next((failure for failure, _ in failures), error)


@contextmanager
def naming_full_disk(path: Any) -> Iterator[None]:
    """Inside, a checkpoint is written: what the system says of the file is raised, and not what comes of it.

    Torch fails once more when it ends the file, e.g. with "unexpected pos".

    Raises:
        OSError: the file cannot be written.
    """
    try:
        yield
    except (OSError, RuntimeError, CheckpointException) as error:
        cause: BaseException | None = _first_of(error)
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None or cause.errno is None or cause.filename is not None:  # Lightning's have no number
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error


def name_changed_rows(exception: BaseException, strategy_name: str) -> None:
    """Adds to an error on sizes, in a step that is not the first, what it may come of: rows kept from another batch."""
    text = str(exception)
    sized = re.search(r"\b(sizes?|shapes?)\b", text) and len(set(re.findall(r"\d+", text))) > 1
    if sized and isinstance(exception, RuntimeError | ValueError | IndexError):
        exception.args = (
            f"{text} (batches of {strategy_name} differ in their numbers of rows: if the step keeps a state for each"
            " row from one batch to the next, or takes rows[rank] of what is gathered, use strategy='hetero_balanced'"
            " as LoadBalancedStrategy(rebalance=False), which keeps equal parts)",
            *exception.args[1:],
        )


def name_lost_peer(exception: BaseException, rank: int, failures: FailureBoard | None) -> None:
    """Adds to a broken collective's error what it means: another rank has failed, has died or hangs.

    Args:
        exception: of this rank.
        rank: this one.
        failures: of the run; None: without a record.
    """
    if not lost_contact(exception):
        return
    text, cause = str(exception), None if failures is None else failures.cause
    said = ", which has died, raised an exception or hung for longer than the strategy's timeout; the cause is in that"
    said, trace = f"{said} rank's output", ""
    if cause is not None:
        said, trace = f": {cause}", "" if cause.__cause__ is None else f"\n{cause.__cause__}"
    if said[2:] not in text:  # else it was said where it was noticed
        exception.args = (f"{text}\nrank {rank} lost contact with another rank{said}{trace}", *exception.args[1:])


_NAMES = {"bf16": torch.bfloat16, "transformer-engine": torch.bfloat16, "16": torch.float16, "64": torch.float64}


def trained_dtype(precision: object) -> torch.dtype:
    """Returns the dtype of matrix products under a Trainer's ``precision``, e.g. float16 under ``"16-mixed"``."""
    return next((dtype for name, dtype in _NAMES.items() if name in str(precision)), torch.float32)


def warn_of_emulation(precision: Precision, device: torch.device, rank: int) -> None:
    """Warns, on the rank concerned, of a device that only emulates what it is to compute."""
    on = device_of(device)
    if trained_dtype(precision.precision) is torch.bfloat16 and not on.computes_bfloat16():
        warnings.warn(
            f"rank {rank} ({on.name()}) does not compute bfloat16: it is emulated there, many times slower, and the"
            f" other ranks wait for it. Use precision='16-mixed' instead of {str(precision.precision)!r}, or leave the"
            " device out",
            RuntimeWarning,
            stacklevel=2,
        )
