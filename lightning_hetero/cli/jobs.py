"""Several jobs in one process, each with ranks of its own (layer A).

Lightning's script launcher starts rank r > 0 by running the command line again with ``LOCAL_RANK=r``. Under
``--multirun`` that would run the whole sweep once per rank, and the variables it leaves behind would make the
next job believe that somebody else has started its ranks (Lightning #11300, Hydra #2070). Here a job

1. rewrites the command line the children get: this job's overrides, a single run, this job's directory;
2. waits for its children and fails if one of them failed;
3. leaves no process group, environment variable or thread count behind.

What a job shows, and where: rank 0's screen, one log of all ranks, and why the job has failed, once.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import read_write
from torch.multiprocessing import ProcessRaisedException

import lightning_hetero
from lightning_hetero import lightning_compat as compat
from lightning_hetero.cluster.score import shares_text
from lightning_hetero.transport.awake import awake_s
from lightning_hetero.transport.failures import lost_contact

_LOG = logging.getLogger(__name__)
_KILLED = "was killed by signal"
_GRACE_S = 2.0  # for a rank that failed first, and whose failure we saw, to end with its own exit code
_FLAGS_WITH_VALUE = {"-cp", "--config-path", "-cn", "--config-name", "-cd", "--config-dir", "-p", "--package"}
_MULTIRUN_FLAGS = {"-m", "--multirun", "-r", "--run"}
# What decides how jobs are swept and where they write; a child is told both.
_SWEEP_PREFIXES = ("hydra.mode", "hydra.run.", "hydra.sweep", "hydra/sweep", "hydra.launch", "hydra/launch")


def child_arguments(
    argv: Sequence[str], task_overrides: Sequence[str], hydra_overrides: Sequence[str], job_num: int | None = None
) -> list[str]:
    """Returns the arguments with which a rank repeats exactly one job of this command line.

    Args:
        argv: the arguments of the command line, without the program.
        task_overrides: the job's own overrides, with every sweep resolved to one value.
        hydra_overrides: overrides of Hydra's own configuration; those about sweeping are dropped.
        job_num: number of the job in its sweep, for configurations that refer to it; None outside of one.

    >>> child_arguments(["-m", "-cn", "train", "seed=1,2"], ["seed=2"], ["hydra.mode=MULTIRUN"], 1)
    ['-cn', 'train', 'seed=2', 'hydra.mode=RUN', 'hydra.job.num=1', "hydra.job.id='1'"]
    """
    kept: list[str] = []
    tokens = iter(argv)
    for token in tokens:
        if token in _FLAGS_WITH_VALUE:
            kept += [token, next(tokens, "")]
        elif token.startswith("-") and token not in _MULTIRUN_FLAGS:
            kept.append(token)
    kept += task_overrides
    kept += [o for o in hydra_overrides if not o.lstrip("+~").startswith(_SWEEP_PREFIXES)]
    kept.append("hydra.mode=RUN")
    if job_num is not None:
        kept += [f"hydra.job.num={job_num}", f"hydra.job.id='{job_num}'"]
    return kept


@contextmanager
def isolated_job(threads_per_rank: int | None) -> Iterator[None]:
    """Runs one Hydra job so that ranks launched inside repeat this job only and nothing outlasts it.

    Args:
        threads_per_rank: CPU threads for each rank's arithmetic; None leaves the choice to Lightning.
    """
    environ, argv, threads = dict(os.environ), list(sys.argv), torch.get_num_threads()
    given = HydraConfig.get().overrides
    sys.argv[1:] = child_arguments(argv[1:], list(given.task), list(given.hydra), job_number())
    # Lightning tells its children this directory; in a sweep it is not the one the job writes to.
    config: Any = HydraConfig.instance().cfg
    with read_write(config.hydra.run):
        config.hydra.run.dir = config.hydra.runtime.output_dir
    if threads_per_rank is not None:
        # Both are needed: the variable reaches the children and stops Lightning from choosing.
        os.environ["OMP_NUM_THREADS"] = str(threads_per_rank)
        torch.set_num_threads(threads_per_rank)
    try:
        yield
    finally:
        leave_process_group()
        sys.argv[:] = argv
        os.environ.clear()
        os.environ.update(environ)
        torch.set_num_threads(threads)


def job_number() -> int | None:
    """Returns the number of the current Hydra job in its sweep; None outside of a sweep."""
    config: Any = HydraConfig.get()
    return config.job.get("num")


def leave_process_group() -> None:
    """Destroys the default process group if there is one, so that the next job opens its own."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def end_children(trainer: Trainer, *, failed: bool, timeout_s: float = 60.0) -> None:
    """Ends the ranks this process has started: waits for them, or stops them soon if the job failed.

    A rank whose death the launcher has tolerated is no failure: the training was finished without it.

    Args:
        trainer: the job's trainer; without a script launcher there is nothing to do.
        failed: this process's own part of the job failed; its exception is about to be raised.
        timeout_s: how long to wait for ranks that are finishing [s].

    Raises:
        RuntimeError: a rank failed or did not finish, and ``failed`` is false.
    """
    launcher = trainer.strategy.launcher
    launched = getattr(launcher, "procs", [])
    children: list[subprocess.Popen[bytes]] = [p for p in launched if isinstance(p, subprocess.Popen)]
    tolerated: set[int] = getattr(launcher, "tolerated", set())
    # Lightning's observer thread looks at this very list and kills *this* process when one of them has
    # failed: right while nobody else watches them, wrong from here on. An empty list ends the thread.
    del launched[:]
    if failed:
        leave_process_group()  # ranks that wait for this one then notice, and end by themselves
    end_s = awake_s() + (_GRACE_S if failed else timeout_s)
    problems = [
        text
        for rank, child in enumerate(children, 1)
        if (text := _end(child, rank, end_s)) and rank not in tolerated
    ]
    if problems and failed:
        # One that was killed may be the cause. Our launcher has said so; Lightning's answer to Ctrl-C, which kills
        # them, is a SystemExit.
        ours, interrupted = hasattr(launcher, "tolerated"), isinstance(sys.exc_info()[1], SystemExit)
        told = any(_KILLED in text for text in problems) and not ours and not interrupted
        _LOG.log(logging.ERROR if told else logging.DEBUG, "%s", "; ".join(problems))
    elif problems:
        raise RuntimeError("; ".join(problems))


def _end(child: subprocess.Popen[bytes], rank: int, end_s: float) -> str:
    """Returns what was wrong with the child, in words; empty if it ended well."""
    try:
        code = child.wait(max(0.0, end_s - awake_s()))
    except subprocess.TimeoutExpired:
        child.kill()  # a rank inside a collective does not react to anything milder
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
        return f"local rank {rank} had not finished and was stopped"
    if code < 0:
        return f"local rank {rank} {_KILLED} {-code}"
    return f"local rank {rank} ended with code {code}" if code else ""


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
