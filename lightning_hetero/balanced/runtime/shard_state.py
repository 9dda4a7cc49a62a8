"""States of optimizers whose parameters are shards, in files that hold whole tensors (layer T).

Torch's optimizers number parameters in the order of their groups, and so does DDP's checkpoint; Lightning's
`ModelParallelStrategy` numbers them as the model does, sorts them in each group, and reads all files in that way.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def is_fresh(optimizer: Optimizer) -> bool:
    """Whether torch would make a step of the optimizer to know what its state looks like."""
    return not optimizer.state and not any(p.grad is not None for p in _trained(optimizer))


def order_groups(saved: Mapping[str, Any], optimizer: Optimizer, model: nn.Module) -> None:
    """Lists the parameters of a whole state's groups in the optimizer's order, by the model's numbers."""
    numbers = {id(p): number for number, p in enumerate(model.parameters())}
    for group, own in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        group["params"] = [numbers[id(p)] for p in own["params"]]


def load_whole(saved: Mapping[str, Any], optimizer: Optimizer, model: nn.Module, *, ours: bool) -> None:
    """Puts a whole state into an optimizer; a collective of the ranks that share a parameter.

    Args:
        saved: of a file.
        optimizer: of this rank.
        model: whose parameters it trains.
        ours: a strategy of ours has written the file.

    Raises:
        ValueError: it is of other parameters, or nobody knows of which.
    """
    own, place = _trained(optimizer), _places(saved["param_groups"], optimizer, model, ours)
    state = {
        place[key]: {name: _sharded_as(own[place[key]], value) for name, value in values.items()}
        for key, values in saved["state"].items()
    }
    groups = [{**group, "params": sorted(place[key] for key in group["params"])} for group in saved["param_groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def load_sharded(folder: Path, name: str, optimizer: Optimizer, model: nn.Module) -> None:
    """Puts into an optimizer what a folder has of it, which may be nothing for some parameters; a collective."""
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    if not any(key.startswith(f"{name}.") for key in saved):
        return  # it holds the model only
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    state["state"] = {
        parameter: kept
        for parameter, values in state["state"].items()
        if (kept := {key: value for key, value in values.items() if f"{name}.state.{parameter}.{key}" in saved})
    }
    dcp.load({name: state}, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state, options=StateDictOptions(strict=False))


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _places(groups: Any, optimizer: Optimizer, model: nn.Module, ours: bool) -> dict[Any, int]:
    """Returns which parameter of the optimizer each key of a whole state means."""
    keys = [key for group in groups for key in group["params"]]
    in_turn = {key: place for place, key in enumerate(keys)}
    numbers = {id(p): number for number, p in enumerate(model.parameters())}
    own = [[numbers[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    by_model = {number: place for place, number in enumerate(number for group in own for number in group)}
    counted, named = keys == [*range(len(keys))], all(isinstance(key, str) for key in keys)
    if [sorted(group["params"]) for group in groups] == [sorted(group) for group in own] and not named:
        if counted and by_model != in_turn and not ours:
            raise ValueError(
                "this file is of DDPStrategy or of ModelParallelStrategy, which number parameters differently where an"
                " optimizer's are not in the model's order: resume once with the strategy that wrote it, and let"
                " hetero_sharded read a distributed checkpoint, or give the optimizer its parameters in the order of"
                " model.parameters()"
            )
        return in_turn if counted else by_model
    if counted or named:
        return in_turn
    raise ValueError("the optimizer's state in this file is of other parameters, or groups of them")


def _sharded_as(parameter: Tensor, value: Any) -> Any:
    """Returns this rank's shard of what an optimizer knows about each element of a parameter."""
    if not isinstance(value, Tensor):
        return value
    value = value.clone()  # the file may be mapped
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
