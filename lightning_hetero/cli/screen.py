"""What a job shows, and where: rank 0's screen, one log of all ranks, and why the job has failed, once (layer A)."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.errors import CompactHydraException
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.multiprocessing import ProcessRaisedException

import lightning_hetero
from lightning_hetero import lightning_compat as compat
from lightning_hetero.cluster.score import shares_text
from lightning_hetero.transport.failures import lost_contact

_GIVEN = "LIGHTNING_HETERO_JOB_LOG"  # tells ranks that Lightning starts for a job where its log is
_OURS = str(Path(lightning_hetero.__file__).parent)
# Loggers with handlers of their own; the package that was imported last speaks for all.
_LOUD = ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
# Says that a rank has died, and kills this process.
_OBSERVER = "lightning.fabric.strategies.launchers.subprocess_script"
_MUCH, _SELDOM = 0.1, 50  # a change of shares that is shown, of an equal share; most steps between two looks


class _Lines(io.TextIOWrapper):
    """Writes whole lines with a rank in front, each at once, so that processes share a file."""

    def __init__(self, path: Path, rank: str) -> None:
        super().__init__(io.FileIO(path, "a"), encoding="utf-8", line_buffering=True)
        self._before, self._rest = f"[rank {rank}] ", ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        super().write("".join(f"{self._before}{line}\n" for line in lines))
        return len(text)


class _Screen(logging.Handler):
    """Shows warnings and what this package says; Lightning's advice is in the log."""

    def emit(self, record: logging.LogRecord) -> None:
        ours = record.pathname.startswith(_OURS) and not getattr(record, "shown", False)
        if ours or record.levelno >= logging.WARNING or record.name == _OBSERVER:
            print(record.getMessage(), file=sys.stderr, flush=True)  # as it is now: Rich puts its own there


class JobScreen(Callback):
    """The screen of a job's process, and the log that all ranks share which Lightning starts for it.

    As a callback it shows shares as they change and, at once, why a rank fails: before others fail because of it.

    Args:
        path: the log, of a process that nobody else's job has started.

    Attributes:
        path: the log.
        started: whether this is a rank that Lightning has started for a job: all it prints goes into the log.
    """

    def __init__(self, path: Path) -> None:
        given = os.environ.get(_GIVEN)
        self.path, self.started = Path(given or path), given is not None
        self._failed, self._rank = self.path.with_name("failed.txt"), os.environ.get("LOCAL_RANK", "0")
        self._stderr, self._told = sys.stderr, False
        self._shown: tuple[int, ...] = ()
        self._shown_at = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stderr": None, "_told": True}  # of a rank of multiprocessing's its parent tells

    @contextmanager
    def showing(self) -> Iterator[None]:
        """Inside, loggers and warnings speak to the log and, in words for the user, to the screen.

        A failure ends with its cause on the screen and its traceback in the log, Ctrl-C with one line and 130.
        """
        lines, interrupted = _Lines(self.path, self._rank), list[int]()
        if self.started:
            self._stderr = os.fdopen(os.dup(2), "w", buffering=1)
            for number in (1, 2):
                os.dup2(lines.fileno(), number)
            sys.stdout = sys.stderr = lines
        else:
            os.environ[_GIVEN] = str(self.path)
            self._failed.unlink(missing_ok=True)

        def interrupt(number: int, frame: object) -> None:
            interrupted.append(number)
            raise KeyboardInterrupt

        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, interrupt) if main else None
        try:
            with _logging_to(lines, *([] if self.started else [_Screen()])):
                yield
        except BaseException as error:
            traceback.print_exception(error, file=lines)
            if interrupted:
                print("interrupted: all ranks have been stopped", file=sys.stderr, flush=True)
                raise SystemExit(128 + signal.SIGINT) from None
            if not isinstance(error, Exception):
                raise
            self._tell(error, shared=False)
            raise CompactHydraException(f"tracebacks of all ranks: {self.path}") from error
        finally:
            if main:
                signal.signal(signal.SIGINT, before)
            if not self.started:
                lines.close()

    def _tell(self, error: Exception, *, shared: bool) -> None:
        """Says why this process fails; of ranks that share a screen, only the first one with its own cause does."""
        if self._told or (self.started and lost_contact(error)):
            return
        self._told, text = True, first_cause(error)
        if shared or self.started or self._failed.exists():
            text = text if text.startswith("rank ") else f"rank {self._rank} failed: {text}"
            with suppress(OSError):  # else nobody can know who was first
                try:
                    with open(self._failed, "x") as file:
                        file.write(f"{text}\n")
                except FileExistsError:
                    return
        with suppress(OSError):
            print(text, file=self._stderr, flush=True)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        shares, step = getattr(trainer.strategy, "shares", ()), trainer.global_step
        full = sum(shares) == getattr(trainer.strategy, "global_batch_size", None)  # an epoch's last batch may not be
        if not (full and trainer.is_global_zero) or step - self._shown_at < min(self._shown_at, _SELDOM):
            return
        much = max(2.0, _MUCH * sum(shares) / len(shares))
        if len(shares) != len(self._shown) or max(abs(a - b) for a, b in zip(shares, self._shown, strict=True)) >= much:
            self._shown, self._shown_at = shares, step
            compat.tell_past_bar(f"step {step}: shares {shares_text(shares)}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # A consequence waits for what the strategy finds out: at the end rank 0 tells.
        if isinstance(exception, Exception) and not lost_contact(exception):
            self._tell(exception, shared=bool(getattr(trainer.strategy.launcher, "procs", ())))


@contextmanager
def _logging_to(lines: _Lines, *screen: logging.Handler) -> Iterator[None]:
    """Inside, what loggers and warnings say goes there only."""
    loggers = [logging.getLogger(name) for name in (None, *_LOUD)]
    before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
    to_log = logging.StreamHandler(lines)
    to_log.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for logger in loggers:
        logger.handlers, logger.propagate = [], True
    loggers[0].handlers = [to_log, *screen]
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate


def first_cause(error: Exception) -> str:
    """Returns in a line what went wrong: an error from another rank says which one and why."""
    if isinstance(error, ProcessRaisedException):
        return f"rank {error.error_index} failed: {str(error).strip().splitlines()[-1]}"
    _, lost, cause = str(error).partition("lost contact with another rank: ")
    if lost:
        return cause.partition("\n")[0]
    return str(error) if str(error).startswith("rank ") else f"{type(error).__name__}: {error}"
