"""Options that this release no longer has: whoever still sets one is told why, and what to do instead."""

from __future__ import annotations

from typing import Any

# {strategy's class: {option: why it went, and the way out}}; an entry stays for one release
REMOVED_OPTIONS: dict[str, dict[str, str]] = {
    "LoadBalancedStrategy": {
        "controller": "a budget on plain data parallelism is the pipeline engine's, whose groups may hold the whole"
        " model: HeteroPipelineStrategy(controller=LyapunovController(budget=...)). Without a budget drop it",
        "check_parameters_every": "as under DDP ranks that start equal and add equal gradients stay equal. Drop it",
        "cooldown": "the guard already calls back shares that do not pay. Drop it, or give"
        " policy=BalancePolicy(cooldown=...)",
        "waiting_modules": "only SyncBatchNorm's waiting is known and left out of a rank's time. Around collectives of"
        " your own in forward write `with self.trainer.strategy.waiting_for_peers():`",
        "sample_weighted_metrics": "means over ranks always count samples, as the loss does. Drop it",
    },
    "FederatedStrategy": {
        "weight_by": "a rank counts the samples that it has used since the last average, or what batch_weight counts."
        " Drop it",
        "optimizer_state": "the optimizers' states are averaged as the parameters are, so that a checkpoint holds all"
        " that goes on. Drop it",
    },
    "BoundedStalenessStrategy": {
        "controller": "ranks ask for samples when they are ready, so there are no shares to decide. To rest a device"
        " that costs more than it brings, use HeteroPipelineStrategy(controller=...), or do not start its rank",
        "overlap": "working ahead made every contribution one version old, which cost several times the final loss."
        " Drop it, or pass a Policy of your own",
        "late": "late contributions always complete the mean that they missed. Drop it, or pass a policy derived from"
        " Flexible with `completes = False`",
    },
    "HeteroPipelineStrategy": {
        "overlap": "transfers always run beside computation, which was the default and never slower. Leave it out",
        "seed": "dropout and whatever else is drawn follow seed_everything, or 0. Call seed_everything(seed)",
        "cache_folder": "a trace keeps what was measured. Pass its path as cluster=, or a ModelCost as profile=",
        "carrier": "training steps are suspended as greenlets, which are installed with the package: leave it out",
    },
}


def refuse_removed(strategy: type, options: dict[str, Any]) -> None:
    """Raises an error for the first of ``options`` that ``strategy``, or a base class of it, had in the last release.

    An option that is None is left out: it asks for nothing.

    Raises:
        TypeError: naming the option, the reason and what to do.
    """
    for base in strategy.__mro__:
        for name, reason in REMOVED_OPTIONS.get(base.__name__, {}).items():
            if options.pop(name, None) is not None:
                raise TypeError(f"{base.__name__} no longer has {name}=: {reason}")
