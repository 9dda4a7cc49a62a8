"""The launcher of ``multiprocessing``: it may go on without a worker that was killed (layer L); see `launchers`."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch.multiprocessing as mp
from lightning.fabric.strategies.launchers.multiprocessing import _check_bad_cuda_fork, _check_missing_main_guard
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot, _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_hetero.lightning_compat.launchers import GRACE_S, LEFT_BEHIND, ending_alone, note_death, would_go_on
from lightning_hetero.transport.awake import awake_s
from lightning_hetero.transport.base import RemoteFailureError
from lightning_hetero.transport.sockets import process_state

_ANSWER_S = 10.0  # for rank 0 to say whether a death is tolerated


class ProcessLauncher(_MultiProcessingLauncher):
    """Starts every local rank as a process of ``multiprocessing`` and waits for them, like Lightning's.

    Args:
        strategy, start_method: as Lightning's.
        tolerates: whether the run would now go on without a worker; asked in local rank 0, from another thread.

    Attributes:
        tolerated: local ranks whose death was tolerated.
    """

    def __init__(
        self, strategy: ParallelStrategy, start_method: Any = "spawn", *, tolerates: Callable[[], bool]
    ) -> None:
        super().__init__(strategy, start_method=start_method)
        self.tolerates = tolerates
        self.tolerated: set[int] = set()

    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Calls ``function`` in every local rank; returns what rank 0's returned.

        Raises:
            torch.multiprocessing.ProcessRaisedException: a rank failed; with its traceback.
            torch.multiprocessing.ProcessExitedException: a rank died whose death is not tolerated.
        """
        # As Lightning's up to the join, which ends everybody when one process has failed.
        if self._start_method in ("fork", "forkserver"):
            _check_bad_cuda_fork()
        if self._start_method == "spawn":
            _check_missing_main_guard()
        if self._already_fit and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            raise NotImplementedError(
                "trainer.fit() a second time on the same Trainer is not possible with a strategy that spawns its"
                " processes; make a new Trainer and pass fit(ckpt_path=...)"
            )
        environment = self._strategy.cluster_environment
        assert environment is not None
        os.environ["MASTER_PORT"] = str(environment.main_port)
        self.tolerated = set()
        context = mp.get_context(self._start_method)
        results = context.SimpleQueue()
        questions, answers = context.Pipe()
        state = _GlobalStateSnapshot.capture() if self._start_method == "spawn" else None
        given = [trainer, function, args, kwargs, results, state]
        with questions:
            with answers:
                processes: Any = mp.start_processes(
                    self._run_rank, args=(answers, *given), nprocs=self._strategy.num_processes,
                    start_method=self._start_method, join=False,
                )  # fmt: skip
            self.procs = processes.processes
            self._join(processes, questions)
        if results.empty():
            raise RuntimeError("local rank 0 has ended without a result, though well: its code has called os._exit(0)")
        output = results.get()
        if trainer is None:
            return output
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        self._recover_results_in_main_process(output, trainer)
        return output.trainer_results

    def _run_rank(self, local_rank: int, answers: Connection, *given: Any) -> None:
        """One rank's process. Local rank 0 answers whether a death is tolerated: the server is its child."""
        if local_rank == 0:
            threading.Thread(target=self._answer, args=(answers,), name="tolerance", daemon=True).start()
        else:
            answers.close()
        with ending_alone(local_rank > 0):
            try:
                self._wrapping_function(local_rank, *given)
            except SIGTERMException as error:
                if local_rank:
                    raise
                # Lightning's own ends without a result, and the process that launched it waits for the result.
                raise RuntimeError("SIGTERM: training was asked to end, and has ended early") from error
            except BaseException as error:
                # Lightning calls this in the process that launches, which knows nothing of the run; ranks must hear.
                self._strategy.on_exception(error)
                raise

    def _answer(self, answers: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                question = answers.recv_bytes()
                answers.send_bytes(question + (b"1" if would_go_on(self.tolerates) else b"0"))

    def _join(self, processes: Any, questions: Connection) -> None:
        """Waits for all ranks; raises what torch raises for the first failure that is not tolerated."""
        while processes.sentinels:
            others_only = 0 not in processes.sentinels.values()
            ended: list[Any] = wait(list(processes.sentinels), GRACE_S if others_only else None)
            if not ended:
                self._end_stopped(processes)
            for sentinel in ended:
                rank = processes.sentinels[sentinel]
                process = processes.processes[rank]
                process.join()
                code = process.exitcode
                left_behind = rank > 0 and (code == LEFT_BEHIND or rank in self.tolerated)
                killed = code < 0 and rank > 0 and not left_behind
                if code and not left_behind and not (killed and _tolerated(questions, processes.processes[0])):
                    self._end_all(processes, sentinel)
                del processes.sentinels[sentinel]
                if code:
                    self.tolerated.add(rank)
                    note_death(rank, code)

    def _end_stopped(self, processes: Any) -> None:
        """Rank 0 has come to the end: nobody waits for a rank that is stopped (SIGSTOP), perhaps for ever."""
        for rank in processes.sentinels.values():
            if process_state(processes.processes[rank].pid) == b"T":
                self.tolerated.add(rank)
                processes.processes[rank].kill()

    @staticmethod
    def _end_all(processes: Any, failed: Any) -> NoReturn:
        others = [s for s in processes.sentinels if s != failed]
        end_s = awake_s() + GRACE_S
        while others and (left_s := end_s - awake_s()) > 0:
            ended = wait(others, left_s)
            others = [s for s in others if s not in ended]
        for process in processes.processes:
            if process.is_alive():
                process.kill()
            process.join(GRACE_S)
        cause = next((s for s in [failed, *processes.sentinels] if _has_cause(processes, s)), failed)
        for sentinel in [s for s in processes.sentinels if s != cause]:
            del processes.sentinels[sentinel]
        processes.join()  # raises for the one that is left, with its traceback
        raise AssertionError("unreachable: torch raises for a process that has failed")


def _has_cause(processes: Any, sentinel: Any) -> bool:
    """Whether this process has left its own traceback, and not only heard from the server of another's failure."""
    try:
        with open(processes.error_files[processes.sentinels[sentinel]], "rb") as file:
            return RemoteFailureError.__name__.encode() not in file.read()
    except OSError:
        return False


def _tolerated(questions: Connection, rank_zero: Any) -> bool:
    """Asks local rank 0; if it does not answer in time, no. What it says later is about an earlier death."""
    question, deadline_s = os.urandom(8), awake_s() + _ANSWER_S
    with suppress(EOFError, OSError):
        questions.send_bytes(question)
        while questions in wait([questions, rank_zero.sentinel], max(0.0, deadline_s - awake_s())):
            answer = questions.recv_bytes()
            if answer[:-1] == question:
                return answer[-1:] == b"1"
    return False
