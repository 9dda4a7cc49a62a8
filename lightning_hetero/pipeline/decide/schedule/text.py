"""The text form of a schedule: for people, for goldens, and to agree on across ranks.

    stages on devices 0 1 2
    head on device 0
    micro-batches 4
    depths 4 3 2
    transfers overlapped
    passes forward backward
    0: F0 a0>1 F1 a1>1 a0<2 H0 g0>2 ...
    1: a0<0 F0 a0>2 ...

A token is a computation and its micro-batch (F forward, H head with loss, B backward), or a message: a activation or
g gradient, its micro-batch, > to or < from a device. Unless stage s is on device s, ``@`` and the stage follow the
micro-batch; the head is stage S. Lines may be wrapped with an indent; what follows a ``#`` is a comment.
"""

from __future__ import annotations

import re
import textwrap

from lightning_hetero.pipeline.decide.schedule.operations import Kind, Operation, Schedule, What

__all__ = ["from_text", "to_text"]

_WIDTH = 110
_HEADER = ("stages on devices", "head on device", "micro-batches", "depths", "transfers", "passes")
_TRANSFERS = {"overlapped": True, "blocking": False}
_PASSES = {"forward backward": True, "forward": False}
_TOKEN = re.compile(r"(?P<sign>[FHBag])(?P<micro>\d+)(?:@(?P<stage>\d+))?(?:(?P<way>[<>])(?P<peer>\d+))?")


def to_text(schedule: Schedule) -> str:
    """Returns the text form; equal schedules have equal texts."""
    with_stage = not _in_order(schedule.devices)
    values = (
        _words(schedule.devices),
        str(schedule.head),
        str(schedule.micro_batches),
        _words(schedule.depths),
        _name(_TRANSFERS, schedule.overlapped),
        _name(_PASSES, schedule.backward),
    )
    lines = [f"{name} {value}" for name, value in zip(_HEADER, values, strict=True)]
    for device, operations in enumerate(schedule.operations):
        tokens = " ".join(op.token(with_stage=with_stage) for op in operations)
        lines += textwrap.wrap(f"{device}: {tokens}", _WIDTH, subsequent_indent="   ", break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def from_text(text: str) -> Schedule:
    """Reads the text form; the result is not checked further (see `check`).

    Raises:
        ValueError: not the text form; names the line or the token.
    """
    lines = _unwrap(text)
    header = [_value(lines, i, name) for i, name in enumerate(_HEADER)]
    devices = _numbers(header[0], _HEADER[0])
    operations: list[tuple[Operation, ...]] = []
    for line in lines[len(_HEADER) :]:
        device, colon, tokens = line.partition(":")
        if not colon or device != str(len(operations)):
            raise ValueError(f"line {line!r} must begin with '{len(operations)}:', the list of that device")
        operations.append(tuple(_read(token, len(operations), devices) for token in tokens.split()))
    return Schedule(
        devices=devices,
        head=_numbers(header[1], _HEADER[1])[0],
        micro_batches=_numbers(header[2], _HEADER[2])[0],
        depths=_numbers(header[3], _HEADER[3]),
        overlapped=_choice(header[4], _HEADER[4], _TRANSFERS),
        backward=_choice(header[5], _HEADER[5], _PASSES),
        operations=tuple(operations),
    )


def _read(token: str, device: int, devices: tuple[int, ...]) -> Operation:
    match = _TOKEN.fullmatch(token)
    if match is None or (match["sign"] in "ag") != (match["way"] is not None):
        raise ValueError(
            f"token {token!r} of device {device} is neither a computation (F0, H0, B0) nor a message (a0>1, g0<1)"
        )
    micro_batch, last = int(match["micro"]), len(devices)
    what = What(match["sign"]) if match["way"] else None
    kind = Kind(match["way"] or match["sign"])
    if kind is Kind.HEAD:
        stage = last
    elif match["stage"] is not None:
        stage = int(match["stage"])
    elif not _in_order(devices):
        raise ValueError(f"token {token!r} of device {device} must name its stage, as in 'F0@1'")
    elif device == 0 and (kind, what) in _OF_THE_HEAD:
        stage = last
    else:
        stage = device
    return Operation(kind, stage, micro_batch, what, int(match["peer"]) if what else None)


_OF_THE_HEAD = ((Kind.RECEIVE, What.ACTIVATION), (Kind.SEND, What.GRADIENT))
"""What device 0 does for the head, if it has one stage: stage 0 gets no activation and hands no gradient on."""


def _in_order(devices: tuple[int, ...]) -> bool:
    return devices == tuple(range(len(devices)))


def _unwrap(text: str) -> list[str]:
    lines: list[str] = []
    for raw in text.splitlines():
        line = raw.partition("#")[0].rstrip()
        if line.startswith(" ") and line.strip() and lines:
            lines[-1] += " " + line.strip()
        elif line:
            lines.append(line.strip())
    return lines


def _value(lines: list[str], i: int, name: str) -> str:
    line = lines[i] if i < len(lines) else ""
    if not line.startswith(name + " "):
        raise ValueError(f"line {i + 1} of a schedule must begin with {name!r}, got {line!r}")
    return line[len(name) + 1 :].strip()


def _numbers(value: str, name: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+( +\d+)*", value):
        raise ValueError(f"{name!r} must be followed by whole numbers, got {value!r}")
    return tuple(map(int, value.split()))


def _choice(value: str, name: str, choices: dict[str, bool]) -> bool:
    if value not in choices:
        raise ValueError(f"{name!r} must be followed by {' or '.join(map(repr, choices))}, got {value!r}")
    return choices[value]


def _name(choices: dict[str, bool], value: bool) -> str:
    return next(name for name, meaning in choices.items() if meaning is value)


def _words(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))
