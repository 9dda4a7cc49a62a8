"""The steps of the three parts, each with its limit; a part takes less than nine minutes.

A step is a function of a module beside this one, or a run of pytest over some of tests/gpu.
"""

from __future__ import annotations

from dataclasses import dataclass

PART_S = 535.0
"""So long a part may take [s]; what is left of it is the limit of its last steps."""


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        part: 1, 2 or 3.
        name: in the table.
        limit_s: then it is ended.
        what: ``module.function`` of this folder, or arguments of pytest.
        gpus: it needs so many, and is skipped with fewer.
        alone: it is not run on simulated GPUs; says why.
        variables: of its environment.
    """

    part: int
    name: str
    limit_s: float
    what: str | tuple[str, ...]
    gpus: int = 1
    alone: str = ""
    variables: tuple[tuple[str, str], ...] = ()


ENGINES = "tests/gpu/test_engines.py"
STEPS = (
    Step(1, "machine", 60, "machine.machine"),
    Step(1, "doctor", 60, "machine.doctor"),
    Step(1, "fork", 45, "forks.optimizers"),
    Step(1, "subgroup", 60, "groups.subgroup"),
    Step(1, "copies", 60, "copies.copies"),
    Step(1, "stop watch", 60, ("tests/gpu/measure",)),
    Step(1, "one rank", 120, "one_rank.engines"),
    Step(1, "one rank, compiled", 60, "one_rank.compiled", alone="a simulated GPU has no kernels to compile for"),
    Step(2, "two ranks", 150, (f"{ENGINES}::test_two_ranks",)),
    Step(2, "four ranks", 75, (f"{ENGINES}::test_four_ranks",)),
    Step(2, "stale and torch.optim", 75, (f"{ENGINES}::test_stale_steps_with",)),
    Step(2, "what users do", 120, (ENGINES, "-k", "not _ranks and not test_stale_steps_with and not waited_for")),
    Step(2, "pipeline", 75, ("tests/gpu/pipeline",)),
    Step(2, "sharded", 60, ("tests/gpu/test_sharded.py",), alone="FSDP resizes storages; simulated ones cannot be"),
    Step(2, "memory", 75, ("tests/gpu/test_memory.py",)),
    Step(2, "two GPUs", 150, ("tests/gpu/test_two_gpus.py",), gpus=2),
    Step(3, "new sizes", 130, "sizes.sizes"),
    Step(3, "step times", 110, "times.step_times"),
    Step(3, "synchronisations", 60, ("tests/gpu/test_synchronisations.py",)),
    Step(3, "unequal ranks", 80, "times.unequal"),
    Step(3, "communicators", 40, "groups.communicators"),
    Step(3, "resume", 75, ("tests/gpu/test_resume.py",)),
    Step(3, "launch blocking", 60, (f"{ENGINES}::test_pipeline_with_kernels_that_are_waited_for",)),
    Step(3, "sanitizer", 170, "machine.sanitizer", alone="there is no memory of a GPU to look at"),
)  # fmt: skip
