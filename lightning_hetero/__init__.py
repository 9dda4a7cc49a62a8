"""lightning-hetero: Lightning strategies for devices that are not all the same.

    Trainer(strategy="hetero_balanced")          # importing this package registers the names
    Trainer(strategy=LoadBalancedStrategy())     # the same, with arguments
    Trainer(strategy="hetero_stale")             # or BoundedStalenessStrategy()
    Trainer(strategy="hetero_pipeline")          # or HeteroPipelineStrategy(backbone="model")
    Trainer(strategy="hetero_auto")              # the one of these that fits; or AutoStrategy()
    Trainer(strategy="hetero_federated")         # or FederatedStrategy(local_steps=10)
    Trainer(strategy="hetero_sharded")           # or ShardedBalancedStrategy(), for modules that shard themselves

Importing it imports neither torch nor Lightning: commands that only read files start at once. The names are registered
when ``lightning.pytorch`` is imported, before or after this package; the classes are imported when one of them is
asked for, or with ``jsonargparse``.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_hetero._version import __version__

__all__ = [
    "AutoStrategy", "BalancePolicy", "BatchRebalancer", "BoundedStalenessStrategy", "FederatedStrategy",
    "HeteroBatchSizeFinder", "HeteroPipelineStrategy", "HeteroTrace", "LoadBalancedStrategy", "LyapunovController",
    "Scenario", "ShardedBalancedStrategy", "StragglerMonitor", "ThrottleCallback", "__version__",
]  # fmt: skip
_STRATEGIES = {
    "balanced": "LoadBalancedStrategy", "stale": "BoundedStalenessStrategy", "pipeline": "HeteroPipelineStrategy",
    "federated": "FederatedStrategy", "auto": "AutoStrategy", "sharded": "ShardedBalancedStrategy",
}  # fmt: skip
_REGISTRIES = {  # by package; in the last two our names are refused
    "lightning.pytorch": "StrategyRegistry", "lightning.fabric": "STRATEGY_REGISTRY",
    "pytorch_lightning": "StrategyRegistry",
}  # fmt: skip

if TYPE_CHECKING:
    from lightning_hetero.public import *
else:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return getattr(import_module("lightning_hetero.public"), name)
        if name.startswith("__") or find_spec(f"lightning_hetero.{name}") is None:
            raise AttributeError(f"module 'lightning_hetero' has no attribute {name!r}")
        return import_module(f"lightning_hetero.{name}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


def _made(name: str, **params: Any) -> object:
    """Returns the strategy of this name, with the arguments it is registered with."""
    return getattr(import_module("lightning_hetero.public"), name)(**params)


def _refused(package: str, **_: Any) -> object:
    raise TypeError(import_module("lightning_hetero.base.checks").REFUSALS[package])


def _register(package: str) -> None:
    """Registers each name of stock DDP's in a package's registry, with ours instead of ``ddp``."""
    strategies = import_module(f"{package}.strategies")
    registry = getattr(strategies, _REGISTRIES[package])
    ddp = {n: entry["init_params"] for n, entry in registry.items() if entry["strategy"] is strategies.DDPStrategy}
    forked = {n.replace("_spawn", "_forkserver"): p for n, p in ddp.items() if "_spawn" in n}
    ddp |= {name: {**params, "start_method": "forkserver"} for name, params in forked.items()}
    for engine, cls in _STRATEGIES.items():
        make = partial(_made, cls) if package == "lightning.pytorch" else partial(_refused, package)
        for name, params in {"ddp": {}}.items() if engine == "sharded" else ddp.items():  # without DDP's arguments
            ours = name.replace("ddp", f"hetero_{engine}", 1)
            registry.register(ours, make, description=f"{cls} of lightning-hetero", override=True, **params)


class _When(MetaPathFinder, Loader):
    """Calls a function when a package has been imported."""

    def __init__(self, package: str, then: Callable[[], object]) -> None:
        self.package, self.then = package, then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self.package:
            return None
        sys.meta_path.remove(self)
        try:
            spec = find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        self.then()


# Command lines look for classes among those that are imported.
_THEN = {"jsonargparse": partial(import_module, "lightning_hetero.public")}
for _package, _then in {**{name: partial(_register, name) for name in _REGISTRIES}, **_THEN}.items():
    if _package in sys.modules:
        _then()
    else:
        sys.meta_path.insert(0, _When(_package, _then))
