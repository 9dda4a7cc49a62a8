"""What a job shows, and where: rank 0's screen, one log of all ranks, and why the job has failed, once (layer A)."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.errors import CompactHydraException
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.multiprocessing import ProcessRaisedException
from tqdm.auto import tqdm

import lightning_hetero
from lightning_hetero import lightning_compat as compat
from lightning_hetero.cluster.score import shares_text
from lightning_hetero.transport.failures import lost_contact

_LOG = logging.getLogger(__name__)
_GIVEN = "LIGHTNING_HETERO_JOB_LOG"  # tells ranks that Lightning starts for a job where its log is
_OURS = str(Path(lightning_hetero.__file__).parent)
_LOUD = ("lightning", "lightning.pytorch", "lightning.fabric")  # Lightning's loggers have handlers of their own
# Says that a rank has died, and kills this process.
_OBSERVER = "lightning.fabric.strategies.launchers.subprocess_script"
_MUCH, _SELDOM = 0.1, 50  # a change of shares that is shown, of an equal share; most steps between two looks


class _Lines(io.TextIOBase):
    """Writes whole lines with a rank in front, each at once, so that processes share a file."""

    def __init__(self, path: Path, rank: int) -> None:
        self._file, self._before, self._rest = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644), rank, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        os.write(self._file, "".join(f"[rank {self._before}] {line}\n" for line in lines).encode())
        return len(text)

    def fileno(self) -> int:
        return self._file

    def close(self) -> None:
        if not self.closed:
            os.close(self._file)
        super().close()


class _Screen(logging.Handler):
    """Shows warnings and what this package says, past a progress bar; Lightning's advice is in the log."""

    def emit(self, record: logging.LogRecord) -> None:
        ours = record.pathname.startswith(_OURS) and not getattr(record, "shown", False)
        if ours or record.levelno >= logging.WARNING or record.name == _OBSERVER:
            with tqdm.external_write_mode():
                print(record.getMessage(), file=sys.stderr, flush=True)


class JobScreen:
    """The screen of a job's process, and the log that all ranks share which Lightning starts for it.

    Args:
        log: the file, of a process that nobody else's job has started.

    Attributes:
        log: the file.
        started: whether this is a rank that Lightning has started for a job: all it prints goes into the log.
    """

    def __init__(self, log: Path) -> None:
        given = os.environ.get(_GIVEN)
        self.log, self.started, self._told = Path(given or log), given is not None, False
        self._rank = int(os.environ.get("LOCAL_RANK", 0))
        self._failed = self.log.with_name("failed.txt")
        if not self.started:
            os.environ[_GIVEN] = str(self.log)
            self._failed.unlink(missing_ok=True)
        self._lines, self._stderr = _Lines(self.log, self._rank), sys.stderr
        if self.started:
            self._stderr = os.fdopen(os.dup(2), "w", buffering=1)
            for number in (1, 2):
                os.dup2(self._lines.fileno(), number)
            sys.stdout = sys.stderr = self._lines

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Inside, loggers and warnings speak to the log and, in words that are for the user, to the screen."""
        loggers = [logging.getLogger(name) for name in (None, *_LOUD)]
        before = [(logger, logger.handlers, logger.propagate) for logger in loggers]
        to_log = logging.StreamHandler(self._lines)
        to_log.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        for logger in loggers:
            logger.handlers, logger.propagate = [], True
        loggers[0].handlers = [to_log] if self.started else [to_log, _Screen()]
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            for logger, handlers, propagate in before:
                logger.handlers, logger.propagate = handlers, propagate
            if not self.started:
                self._lines.close()

    def tell(self, error: Exception, *, shared: bool) -> None:
        """Says why this process fails; of ranks that share a screen, only the first one with its own cause does."""
        if self._told or (self.started and lost_contact(error)):
            return
        self._told, text = True, first_cause(error)
        if shared or self.started or self._failed.exists():
            if not text.startswith("rank "):
                text = f"rank {self._rank} failed: {text}"
            try:
                with open(self._failed, "x") as file:
                    file.write(f"{text}\n")
            except FileExistsError:
                return
            except OSError:
                pass  # nobody can know who was first
        with suppress(OSError):
            print(text, file=self._stderr, flush=True)


class OnScreen(Callback):
    """Shows shares as they change, and, at once, why a rank fails: before the others fail because of it."""

    def __init__(self, screen: JobScreen) -> None:
        self._screen: JobScreen | None = screen
        self._shown: tuple[int, ...] = ()
        self._shown_at = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_screen": None}  # a rank that multiprocessing starts shares the screen only

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        shares, step = getattr(trainer.strategy, "shares", ()), trainer.global_step
        if not (shares and trainer.is_global_zero) or step - self._shown_at < min(self._shown_at, _SELDOM):
            return
        much = max(2.0, _MUCH * sum(shares) / len(shares))
        if len(shares) != len(self._shown) or max(abs(a - b) for a, b in zip(shares, self._shown, strict=True)) >= much:
            self._shown, self._shown_at = shares, step
            compat.tell_past_bar(f"step {step}: shares {shares_text(shares)}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # A consequence waits for what the strategy finds out: at the end rank 0 tells.
        if self._screen is not None and isinstance(exception, Exception) and not lost_contact(exception):
            self._screen.tell(exception, shared=bool(getattr(trainer.strategy.launcher, "procs", ())))


def first_cause(error: Exception) -> str:
    """Returns in a line what went wrong: an error from another rank says which one and why."""
    if isinstance(error, ProcessRaisedException):
        return f"rank {error.error_index} failed: {str(error).strip().splitlines()[-1]}"
    _, lost, cause = str(error).partition("lost contact with another rank: ")
    if lost:
        return cause.partition("\n")[0]
    return str(error) if str(error).startswith("rank ") else f"{type(error).__name__}: {error}"


@contextmanager
def ending_in_words(screen: JobScreen) -> Iterator[None]:
    """A failure inside ends with its cause on the screen and its traceback in the log, Ctrl-C with one line and 130."""
    interrupted: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        interrupted.append(number)
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, interrupt) if main else None
    try:
        with screen.logging():
            try:
                yield
            except BaseException:
                _LOG.info("the job has ended before its time", exc_info=True, extra={"shown": True})
                raise
    except BaseException as error:
        if interrupted:
            print("interrupted: all ranks have been stopped", file=sys.stderr, flush=True)
            raise SystemExit(128 + signal.SIGINT) from None
        if not isinstance(error, Exception):
            raise
        screen.tell(error, shared=False)
        raise CompactHydraException(f"tracebacks of all ranks: {screen.log}") from error
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
