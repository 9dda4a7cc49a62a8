"""What is printed to be pasted: an engine's set-up as Python (layer P).

tests/docs/test_paste.py runs what comes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
