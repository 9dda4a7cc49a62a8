"""README's three runs as recorded: what each says that another would take is within 10 % of the run beside it."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from lightning_hetero.cluster.score import last_lines
from lightning_hetero.record import read_events
from lightning_hetero.record.ledger import ledger_of
from lightning_hetero.record.run import RecordedRun, run_of
from lightning_hetero.report.figures import alternatives_of

RUNS = Path(__file__).parents[1] / "record" / "readme_runs"
ENGINES = ("ddp", "balanced", "stale")


@pytest.fixture(scope="module", name="runs")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RecordedRun]:
    folder = tmp_path_factory.mktemp("runs")

    def read(engine: str) -> RecordedRun:
        path = folder / f"{engine}.jsonl"
        path.write_bytes(gzip.decompress((RUNS / f"{engine}.jsonl.gz").read_bytes()))
        return run_of(read_events(path), name=engine)

    return {engine: read(engine) for engine in ENGINES}


@pytest.mark.parametrize("of", ENGINES)
def test_what_a_run_says_of_the_others_is_what_they_took(runs: dict[str, RecordedRun], of: str) -> None:
    found = alternatives_of(runs[of], ledger_of(runs[of]))
    assert found is not None
    took_s = {engine: ledger_of(run).step_s for engine, run in runs.items()}
    assert found.measured_s == took_s[of] and found.samples == 64
    assert found.engines == pytest.approx(took_s, rel=0.1)


def test_the_monitor_says_the_same_as_the_report(runs: dict[str, RecordedRun]) -> None:
    ledger = ledger_of(runs["ddp"])
    found = alternatives_of(runs["ddp"], ledger)
    assert found is not None
    first, second = last_lines(ledger).splitlines()
    assert f"{100 * ledger.waited:.0f} % of your 4 ranks' time" in first and "A step took 211.0 ms" in first
    for engine in ("balanced", "stale"):
        assert f"{1e3 * found.engines[engine]:.1f} ms" in second and f"hetero_{engine}" in second
    of_shards = last_lines(ledger, sharded=True)  # under ModelParallelStrategy: no other engine of ours trains it
    ours = second.replace("balanced", "sharded").partition("', ")[0]
    assert of_shards == f"{first}\n{ours}'."


def test_the_last_full_batch_is_full(runs: dict[str, RecordedRun]) -> None:
    """Each epoch ends with a batch of 32 samples, which is no full one."""
    assert ledger_of(runs["ddp"]).shares == (16,) * 4
    assert ledger_of(runs["balanced"]).shares == (24, 23, 12, 5)
    stale = ledger_of(runs["stale"])
    assert stale.batch == 64 and sum(stale.shares) == pytest.approx(64, abs=2)
    assert [run.full.count(91) for run in runs.values()] == [0, 0, 0]
