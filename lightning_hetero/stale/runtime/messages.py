"""What workers and server tell one another as text or as bytes: each form is written and read here (layer T)."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_hetero.stale.decide.effects import Span
from lightning_hetero.stale.decide.report import Counts, Measures
from lightning_hetero.transport.base import RemoteFailureError


@dataclass(frozen=True, slots=True)
class EpochBegin:
    """How a worker begins an epoch, which all must do alike.

    Attributes:
        layout: digest of its layout.
        tick: first tick.
        applied: samples that are applied already.
    """

    layout: str
    tick: int
    applied: tuple[Span, ...]

    @classmethod
    def of(cls, layout: str, tick: int, applied: Iterable[Sequence[int]]) -> EpochBegin:
        """Returns it with plain numbers."""
        return cls(str(layout), int(tick), tuple((int(start), int(end)) for start, end in applied))

    def text(self) -> str:
        """Returns the text of the request."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def read(cls, text: str) -> EpochBegin:
        """Returns what a request says; raises ValueError if that cannot be understood."""
        return _read(text, lambda said: cls.of(**said))


@dataclass(frozen=True, slots=True)
class Met:
    """All live workers have met.

    Attributes:
        alive: their ranks.
        generation: number of membership changes so far.
        counts: what the server has counted.
        notices: what it has to say to people.
    """

    alive: tuple[int, ...]
    generation: int
    counts: Counts
    notices: Sequence[str]

    @staticmethod
    def text(counts: Counts, notices: Sequence[str]) -> str:
        """Returns the text of the reply, which has the rest in its fields."""
        return _text({"counts": counts.as_dict(), "notices": notices})

    @classmethod
    def read(cls, alive: Sequence[int], generation: int, text: str) -> Met:
        """Returns what a reply says."""
        return _read(
            text, lambda said: cls(tuple(alive), generation, Counts.of(said["counts"]), said["notices"])
        )


def measures_text(measures: Measures) -> str:
    """Returns measures as the text of a reply."""
    return _text(measures.as_dict())


def measures_of(text: str) -> Measures:
    """Returns the measures in a reply."""
    return _read(text, Measures.of)


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
    `RemoteFailureError` as its cause, so that the caller handles it alike on all ranks. Where this process has no such
    class, or cannot make an equal one of it, it is the `RemoteFailureError`.
    """
    words, _, cause = text.partition(_CAUSE)
    error: BaseException = RemoteFailureError(words)
    if cause:
        with contextlib.suppress(ValueError, TypeError):
            module, name, said, args = json.loads(cause)
            twin = _twin(module, name, said, args)
            if twin is not None:
                twin.__cause__ = error
                return twin
    return error


def _twin(module: str, name: str, said: str, args: Sequence[Any]) -> BaseException | None:
    """Makes an exception from its parts; its class's own constructor is not called, which may want anything."""
    for kind in _exceptions():
        if (kind.__module__, kind.__qualname__) == (module, name):
            for candidate in (args, [said]):
                with contextlib.suppress(Exception):
                    twin = kind.__new__(kind, *candidate)
                    twin.args = tuple(candidate)
                    if type(twin) is kind and str(twin) == said:
                        return twin
    return None


def _exceptions() -> Iterator[type[BaseException]]:
    """All classes of errors this process knows, and Ctrl-C; those defined last first."""
    waiting: list[type[BaseException]] = [Exception]
    yield KeyboardInterrupt
    while waiting:
        kind = waiting.pop()
        yield kind
        waiting += kind.__subclasses__()


def _text(plain: dict[str, Any]) -> str:
    return json.dumps(plain, separators=(",", ":"))


def _read(text: str, build: Callable[[Any], Any]) -> Any:
    try:
        return build(json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{text[:200]!r} cannot be understood ({error})") from error
