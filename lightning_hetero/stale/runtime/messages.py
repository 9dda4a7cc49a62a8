"""What workers and server tell one another as text or as bytes: each form is written and read here (layer T)."""

from __future__ import annotations

import io
import json
import pickle
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from lightning_hetero.stale.decide.report import Counts
from lightning_hetero.transport.base import RemoteFailureError, Reply
from lightning_hetero.transport.membership import Met


@dataclass(frozen=True, slots=True)
class MetAtServer(Met):
    """All live workers have met.

    Attributes:
        counts: what the server has counted.
    """

    counts: Counts = field(default_factory=Counts)

    @staticmethod
    def text(counts: Counts, notices: Sequence[str]) -> str:
        """Returns the text of the reply, which has the rest in its fields."""
        return json.dumps({"counts": counts.as_dict(), "notices": notices})

    @classmethod
    def read(cls, reply: Reply) -> MetAtServer:
        """Returns what a reply says."""
        said = json.loads(reply.text)
        return cls(tuple(reply.numbers), not reply.flags, tuple(said["notices"]), counts=Counts.of(said["counts"]))


def state_bytes(state: dict[str, Any]) -> bytes:
    """Returns the server's state, a tree of plain values and tensors, as bytes."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def state_of(data: bytes) -> dict[str, Any]:
    """Returns the state in ``data``; nothing in it can run code.

    Raises:
        ValueError: ``data`` is damaged, or the state holds what is neither plain nor a tensor, e.g. an object that an
            optimizer keeps; the message names its class.
    """
    try:
        return torch.load(io.BytesIO(data), weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"{len(data)} bytes are no state of a server: {error}") from error


_CAUSE = "\0"  # between what is said of a failure and the exception that it was


def failure_text(words: str, error: BaseException | None) -> str:
    """Returns why a worker failed as the text of a request: in words, and which exception it was."""
    if error is None:
        return words
    kind, plain = type(error), all(isinstance(arg, str | int | float) for arg in error.args)
    return words + _CAUSE + json.dumps([kind.__module__, kind.__qualname__, str(error), error.args if plain else []])


def failure_of(text: str) -> BaseException:
    """Returns what to raise for a failure of the run.

    That is the exception which another worker's own code has raised, of the same class and text, with a
    `RemoteFailureError` as its cause, so that all ranks handle it equally. Where no module of this process
    has that class, or an equal one cannot be made of it, it is the `RemoteFailureError`.
    """
    words, _, cause = text.partition(_CAUSE)
    error = RemoteFailureError(words)
    with suppress(Exception):  # no such class here, or one that is not made from these arguments
        module, name, said, args = json.loads(cause)
        kind = attrgetter(name)(sys.modules[module])
        if issubclass(kind, Exception | KeyboardInterrupt):
            for candidate in (args, [said]):
                twin = kind.__new__(kind, *candidate)  # its own constructor may want anything
                twin.args = tuple(candidate)
                if type(twin) is kind and str(twin) == said:
                    twin.__cause__ = error
                    return twin
    return error
