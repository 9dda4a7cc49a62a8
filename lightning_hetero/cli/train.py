"""``lightning-hetero-train``: train one configuration, or compare several (layer A).

    lightning-hetero-train                                   # digits, DDP, four devices of unequal speed
    lightning-hetero-train -m strategy=ddp,hetero_balanced   # the same twice, and a table that compares
    lightning-hetero-train experiment=stale_digits emulation=dying_rank   # a rank is killed; training goes on

Each job writes ``result.json`` and ``report.html`` into its output directory and prints a table of its ranks; a
multirun ends with a table of its jobs. Only rank 0 writes and prints.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback as HydraCallback
from hydra.utils import instantiate
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf

from lightning_hetero import lightning_compat as compat
from lightning_hetero.callbacks import ThrottleCallback
from lightning_hetero.checked import finite_or_none
from lightning_hetero.cli import report
from lightning_hetero.cli.command import CONF, start
from lightning_hetero.cli.jobs import JobScreen, end_children, isolated_job, job_number
from lightning_hetero.pipeline.strategy import HeteroPipelineStrategy
from lightning_hetero.record import read_events
from lightning_hetero.record.files import write_file
from lightning_hetero.record.ledger import Tally, ledger_of, samples_in
from lightning_hetero.record.run import run_of

_LOG = logging.getLogger(__name__)


def new_folder(wanted: str) -> str:
    """Makes a folder that nobody has made before, ``wanted``, or with ``-1``, ``-2``, ... behind; returns its path."""
    number = 0
    try:
        while True:
            with suppress(FileExistsError):
                os.makedirs(path := f"{wanted}-{number}" if number else wanted)
                return path
            number += 1
    except OSError as error:  # not an Exception from here on: Hydra would tell of it in a page
        raise SystemExit(
            f"no folder can be made in {Path(wanted).parent.absolute()} ({error.strerror}): choose another one with"
            " hydra.run.dir=FOLDER, or for -m with hydra.sweep.dir=FOLDER"
        ) from None


OmegaConf.register_new_resolver("hetero_new_folder", new_folder, use_cache=True, replace=True)


def say(text: str) -> None:
    """Prints; a reader who has gone, as in ``| head``, ends no job."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build(config: Any, **arguments: Any) -> Any:
    """Returns the object a ``_target_`` describes, lists of plain values; None for an empty config.

    The one place where objects are made from configuration.
    """
    return None if config is None else instantiate(config, _convert_="all", **arguments)


class FitClock(Callback):
    """Writes how long training took, without start-up, from the process that trained.

    Into a file, because with a launcher that spawns, the process which asked for the training is not that one.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.clocked: dict[str, Any] = {}
        self._started_s, self._batches = 0.0, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started_s = time.perf_counter()
        self._batches = compat.batches_of_all_epochs(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            fit_s = time.perf_counter() - self._started_s
            batches = compat.batches_of_all_epochs(trainer) - self._batches
            self.clocked = {"fit_s": fit_s, "steps": trainer.global_step, "batches": batches}
            write_file(self.path, json.dumps(self.clocked))


class ComparisonTable(HydraCallback):
    """Prints the table of a multirun's jobs after the last one (a Hydra callback)."""

    def __init__(self) -> None:
        self.directories: list[str] = []

    def on_job_end(self, config: DictConfig, job_return: Any, **kwargs: Any) -> None:
        self.directories.append(config.hydra.runtime.output_dir)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        # A launcher that runs jobs elsewhere calls on_job_end there; then the sweep's directory tells.
        found = self.directories or sorted(p.parent for p in Path(config.hydra.sweep.dir).rglob(report.RESULT_FILE))
        results = [report.read_result(Path(directory) / report.RESULT_FILE) for directory in found]
        # Without a job the file is only the clock's: that job did not end well.
        results = sorted((r for r in results if "job" in r), key=lambda result: result["job"])
        if results:
            say("\n" + report.comparison_table(results))


def run_job(cfg: DictConfig, screen: JobScreen) -> float | None:
    """Trains one composed configuration and returns its validation metric.

    Args:
        cfg: the configuration.
        screen: of this process.

    Returns:
        The value of ``cfg.metric.name``; None on ranks other than 0, and if nothing of that name was logged.

    Raises:
        RuntimeError: a rank failed. Whatever the training itself raises passes through.
    """
    if cfg.seed is not None:
        seed_everything(cfg.seed, workers=True)
    output_dir = Path(cfg.paths.output_dir)
    model, data = build(cfg.model), build(cfg.data)
    trainer = make_trainer(cfg, output_dir, screen)
    failed = True
    try:
        trainer.fit(model, datamodule=data)
        metrics = final_metrics(trainer, model, data, cfg.metric.name)
        if torch.distributed.is_initialized():
            trainer.strategy.barrier("end of job")
        failed = False
    finally:
        end_children(trainer, failed=failed)
    if not trainer.is_global_zero:
        return None
    clock = next(callback for callback in compat.trainer_callbacks(trainer) if isinstance(callback, FitClock))
    result = collect_result(cfg, clock, metrics)
    write_file(clock.path, json.dumps(result, indent=2) + "\n")
    summary = job_report(result)
    if Path(cfg.paths.events_dir).is_dir():
        summary += f"\nreport: {report_of(cfg, output_dir)}"
    say(summary)
    _LOG.info("%s", summary, extra={"shown": True})
    return result["metric"]["value"]


def report_of(cfg: DictConfig, output_dir: Path) -> Path | str:
    """Writes the job's report into its folder; returns where, or in words why not: the training is over and
    is not lost."""
    try:
        return report.write_report(output_dir, trace_dir=cfg.paths.events_dir)[0]
    except Exception as error:
        _LOG.warning("the report could not be written", exc_info=True)
        return f"none ({type(error).__name__}: {error})"


def check_groups(cfg: DictConfig, strategy: Any) -> None:
    """Says what was chosen and is read by nobody.

    Raises:
        ValueError: a key next to the one that the command reads; with the place where it belongs.
    """
    for group, read, of in (("emulation", "scenario", "a scenario's"), ("cluster", "spec", "a cluster's")):
        for name in sorted(set(cfg.get(group) or {}) - {read, "_target_"}):
            raise ValueError(
                f"nobody reads {group}.{name}: {of} arguments are {group}.{read}.*, here {group}.{read}.{name}=..."
            )
    if cfg.get("cluster") and cfg.cluster.spec is not None and not isinstance(strategy, HeteroPipelineStrategy):
        rank_zero_warn(
            f"the chosen cluster has no effect: {type(strategy).__name__} reads no description of devices, which"
            " strategy=hetero_pipeline plans with; emulation=... makes devices unequal for every strategy"
        )


def make_trainer(cfg: DictConfig, output_dir: Path, *more: Callback) -> Trainer:
    """Returns the trainer with the configured strategy, loggers, callbacks, ``more`` of them, and emulated devices."""
    strategy = build(cfg.strategy)
    check_groups(cfg, strategy)
    callbacks = [build(callback) for callback in (cfg.callbacks or {}).values() if callback is not None]
    callbacks += [FitClock(output_dir / report.RESULT_FILE), *more]
    scenario = build(cfg.emulation.scenario) if cfg.emulation else None
    if scenario is not None:
        callbacks.append(ThrottleCallback(scenario))
    loggers = [build(logger) for logger in (cfg.logger or {}).values() if logger is not None]
    bar = cfg.trainer.get("enable_progress_bar")
    given = {"strategy": strategy, "callbacks": callbacks, "logger": loggers or False}
    return build(cfg.trainer, **given, enable_progress_bar=sys.stdout.isatty() if bar is None else bar)


def final_metrics(trainer: Trainer, model: LightningModule, data: Any, wanted: str) -> dict[str, float]:
    """Returns everything logged last; validates once more if training ended without validating."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if wanted not in metrics:
        trainer.validate(model, datamodule=data, verbose=False)
        metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    return metrics


def collect_result(cfg: DictConfig, clock: FitClock, metrics: dict[str, float]) -> dict[str, Any]:
    """Returns the job's result as plain JSON values, from the clock, or its file, and the ranks' traces.

    Raises:
        RuntimeError: training ended before it began, e.g. with ``max_epochs=0``.
    """
    hydra_cfg = HydraConfig.get()
    clocked = clock.clocked or report.read_result(clock.path)
    if not clocked:
        raise RuntimeError(
            "nothing was trained; check trainer.max_epochs, trainer.max_steps and trainer.limit_train_batches"
        )
    run = report.read_if_there(cfg.paths.events_dir, lambda folder: run_of(read_events(folder)))
    ledger = ledger_of(run) if run is not None and run.steps else Tally(0).ledger(problem="not known: no trace")
    samples, wasted = (0, 0) if run is None else samples_in(run, clocked["batches"])
    note = "; ".join(filter(None, (ledger.problem, ledger.note, ledger.too_few)))
    return {
        "job": job_number() or 0, "overrides": list(hydra_cfg.overrides.task),
        "strategy": hydra_cfg.runtime.choices.get("strategy"), "scenario": hydra_cfg.runtime.choices.get("emulation"),
        **clocked, "samples": samples or None, "wasted_samples": wasted if samples else None,
        "samples_per_s": samples / clocked["fit_s"] if samples else None, "step_s": finite_or_none(ledger.step_s),
        "waiting": finite_or_none(ledger.waited), "waited_device_s": finite_or_none(ledger.total.idle_s),
        "device_s": finite_or_none(ledger.total.total_s),
        "metric": {"name": cfg.metric.name, "mode": cfg.metric.mode, "value": metrics.get(cfg.metric.name)},
        "metrics": {name: finite_or_none(value) for name, value in metrics.items()},
        "ranks": [asdict(rank) for rank in ledger.figures], "note": note,
    }  # fmt: skip


# Lightning calling torch names that torch 2.13 has renamed: nothing a user of this command can act on.
UPSTREAM_WARNINGS = (r".*LeafSpec.*is deprecated", r".*_functional_collectives\.all_gather_single")


def job_report(result: dict[str, Any]) -> str:
    """Returns what a job prints at its end: a headline and the table of its ranks."""
    metric = result["metric"]
    value = "-" if metric["value"] is None else f"{metric['value']:.4f}"
    headline = (
        f"\n{result['strategy']} on {result['scenario']}: "
        f"{result['steps']} steps in {result['fit_s']:.2f} s, {metric['name']} {value}"
    )
    parts = [headline, report.rank_table(result["ranks"]) if result["ranks"] else "", result["note"]]
    return "\n".join(filter(None, parts))


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Entry point of ``lightning-hetero-train`` and ``python -m lightning_hetero.cli.train``."""
    for message in UPSTREAM_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    with isolated_job(cfg.threads_per_rank):
        screen = JobScreen(Path(cfg.paths.output_dir) / f"{HydraConfig.get().job.name}.log")
        with screen.showing():
            return run_job(cfg, screen)


if __name__ == "__main__":
    start("train")
