"""Several jobs in one process, each with ranks of its own (layer A).

Lightning's script launcher starts rank r > 0 by running the command line again with ``LOCAL_RANK=r``. Under
``--multirun`` that would run the whole sweep once per rank, and the variables it leaves behind would make the
next job believe that somebody else has started its ranks (Lightning #11300, Hydra #2070). Here a job

1. rewrites the command line the children get: this job's overrides, a single run, this job's directory;
2. waits for its children and fails if one of them failed;
3. leaves no process group, environment variable or thread count behind.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Trainer
from omegaconf import read_write

from lightning_hetero.transport.awake import awake_s

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
