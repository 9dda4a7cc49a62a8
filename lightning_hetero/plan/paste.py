"""What is printed to be pasted: an engine's set-up as Python, and as a command where the model is the command's own
(layer P).

tests/docs/test_paste.py runs what comes of it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, cast

from lightning_hetero.plan.estimate import Estimate

_CLASSES = {
    "balanced": "LoadBalancedStrategy", "stale": "BoundedStalenessStrategy", "pipeline": "HeteroPipelineStrategy",
    "sharded": "ShardedBalancedStrategy",
}  # fmt: skip
_WIDTH = 100


def snippet(found: Estimate, trainer: Mapping[str, Any] | None = None, **strategy: Any) -> str:
    """Returns the Python that trains as the estimate says, with the user's module.

    Args:
        found: which can train.
        trainer: more arguments of the Trainer.
        strategy: more arguments of the strategy's constructor.

    >>> from lightning_hetero.plan.estimate import Estimate
    >>> found = Estimate(engine="balanced", step_s=1.0, work_s=(1.0, 1.0), arguments={"global_batch_size": 64})
    >>> print(snippet(found, {"accelerator": "cpu"}))
    from lightning.pytorch import Trainer
    from lightning_hetero import LoadBalancedStrategy
    <BLANKLINE>
    trainer = Trainer(devices=2, accelerator='cpu', strategy=LoadBalancedStrategy(global_batch_size=64))
    """
    devices = {"devices": len(found.work_s), **(trainer or {})}
    lines, made, name = ["from lightning.pytorch import Trainer"], "'ddp'", _CLASSES.get(found.engine)
    if name is not None:
        lines.append(f"from lightning_hetero import {name}")
        given = [f"{key}={value!r}" for key, value in {**found.arguments, **strategy}.items()]
        made = f"{name}({', '.join(given)})"
        if len(made) > _WIDTH // 2:
            lines += ["", f"strategy = {name}(", *(f"    {one}," for one in given), ")"]
            made = "strategy"
    else:
        lines += [""] + ([f"# the loader's batch_size={found.batch_size}"] if found.batch_size else [])
    blank = [] if "" in lines else [""]
    called = ", ".join([*(f"{key}={value!r}" for key, value in devices.items()), f"strategy={made}"])
    return "\n".join([*lines, *blank, f"trainer = Trainer({called})"])


def command(found: Estimate, chosen: Sequence[str]) -> str:
    """Returns the line of ``lightning-hetero-train`` that trains as the estimate says.

    Args:
        found: which can train.
        chosen: overrides that name model, data, cluster and what else is as it was measured.
    """
    batch = {} if found.batch_size is None else {"data.batch_size": found.batch_size}
    strategy = {f"strategy.{name}": value for name, value in found.arguments.items()}
    given = {"strategy": found.strategy, "trainer.devices": len(found.work_s), **batch, **strategy}
    words = [*chosen, *(f"{name}={hydra_text(value)}" for name, value in given.items())]
    return f"lightning-hetero-train {shlex.join(words)}"


def hydra_text(value: Any) -> str:
    """Returns a plain value as Hydra's command line takes it.

    >>> hydra_text({"groups": [{"ranks": (1, 0), "samples": 10}]})
    '{groups:[{ranks:[1,0],samples:10}]}'
    """
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return f"{{{','.join(f'{name}:{hydra_text(item)}' for name, item in items)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(hydra_text, cast('list[Any]', value)))}]"
    return str(value)
