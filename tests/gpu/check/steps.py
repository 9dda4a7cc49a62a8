"""The steps of the check, each with its limit: first those that may run beside others, then the quiet ones.

A step is a function of a module beside this one, or a run of pytest over some of tests/gpu.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name: in the table.
        limit_s: then it is ended.
        what: ``module.function`` of this folder, or arguments of pytest.
        gpus: it needs so many, and is skipped with fewer.
        alone: it is not run on simulated GPUs; says why.
        quiet: it measures time or memory: nothing else runs beside it.
    """

    name: str
    limit_s: float
    what: str | tuple[str, ...]
    gpus: int = 1
    alone: str = ""
    quiet: bool = False


ENGINES = "tests/gpu/test_engines.py"
STEPS = (
    Step("machine", 60, "machine.machine"),
    Step("sanitizer", 170, "machine.sanitizer", alone="there is no memory of a GPU to look at"),  # the longest
    Step("doctor", 60, "machine.doctor"),
    Step("fork", 45, "forks.optimizers"),
    Step("subgroup", 60, "groups.subgroup"),
    Step("one rank", 120, "one_rank.engines"),
    Step("one rank, compiled", 60, "one_rank.compiled", alone="a simulated GPU has no kernels to compile for"),
    Step("two ranks", 150, (f"{ENGINES}::test_two_ranks",)),
    Step("four ranks", 75, (f"{ENGINES}::test_four_ranks",)),
    Step("stale and torch.optim", 75, (f"{ENGINES}::test_stale_steps_with",)),
    Step("what users do", 120, (ENGINES, "-k", "not _ranks and not test_stale_steps_with and not waited_for")),
    Step("pipeline", 120, ("tests/gpu/pipeline",)),
    Step("sharded", 120, ("tests/gpu/test_sharded.py",)),
    Step("memory", 75, ("tests/gpu/test_memory.py",)),
    Step("two GPUs", 150, ("tests/gpu/test_two_gpus.py",), gpus=2),
    Step("synchronisations", 60, ("tests/gpu/test_synchronisations.py",)),
    Step("resume", 75, ("tests/gpu/test_resume.py",)),
    Step("launch blocking", 60, (f"{ENGINES}::test_pipeline_with_kernels_that_are_waited_for",)),
    Step("copies", 60, "copies.copies", quiet=True),
    Step("stop watch", 75, ("tests/gpu/measure",), quiet=True),
    Step("new sizes", 130, "sizes.sizes", quiet=True),
    Step("step times", 110, "times.step_times", quiet=True),
    Step("unequal ranks", 80, "times.unequal", quiet=True),
    Step("communicators", 40, "groups.communicators", quiet=True),
)  # fmt: skip
