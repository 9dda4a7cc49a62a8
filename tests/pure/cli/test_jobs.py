"""The command line a rank gets: checked with Hydra's own parser, for any mix of flags and overrides."""

from __future__ import annotations

from hydra._internal.utils import get_args_parser
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.cli.jobs import child_arguments

FLAGS = [
    ["-cn", "train"],
    ["--config-dir", "/dir"],
    ["--config-path=conf"],
    ["-m"],
    ["--multirun"],
    ["-r"],
]
SWEPT = ["seed=1,2", "strategy=ddp,x", "+a=b", "~c", "hydra.sweep.dir=d"]


@given(
    flags=st.lists(st.sampled_from(FLAGS), max_size=4),
    swept=st.lists(st.sampled_from(SWEPT), max_size=4),
    first=st.booleans(),
    number=st.one_of(st.none(), st.integers(0, 20)),
)
def test_a_rank_runs_one_job_with_the_same_configuration(flags, swept, first, number) -> None:
    words = [word for flag in flags for word in flag]
    argv = [*swept, *words] if first else [*words, *swept]
    task = ["seed=2", "strategy=x"]
    parsed = get_args_parser().parse_args(
        child_arguments(argv, task, ["hydra.mode=MULTIRUN"], number)
    )
    given_flags = get_args_parser().parse_args(words)
    assert not parsed.multirun and not parsed.run
    for name in ("config_name", "config_dir", "config_path"):
        assert getattr(parsed, name) == getattr(given_flags, name)
    expected = [*task, "hydra.mode=RUN"]
    if number is not None:
        expected += [f"hydra.job.num={number}", f"hydra.job.id='{number}'"]
    assert parsed.overrides == expected


def test_only_what_says_how_to_sweep_is_dropped_from_hydras_overrides() -> None:
    kept = ["hydra.searchpath=[pkg://x]", "hydra.verbose=true"]
    dropped = ["hydra.mode=MULTIRUN", "hydra.sweep.dir=x", "hydra/launcher=joblib"]
    dropped += ["+hydra.sweeper.params={}", "hydra.run.dir=elsewhere"]
    assert child_arguments([], [], kept + dropped) == [*kept, "hydra.mode=RUN"]
