"""docs/reference/troubleshooting.md: every message that users may meet is in it, and no other."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.docs.kit import REFERENCE, ROOT, rows


def strings_in(node: ast.AST) -> list[str]:
    """Returns the texts inside a piece of code, cut where an f-string inserts a value."""
    constants = (c.value for c in ast.walk(node) if isinstance(c, ast.Constant))
    return [value for value in constants if isinstance(value, str) and value.strip()]


# Functions whose text somebody reads.
TELLS = {"rank_zero_warn", "warn", "warn_once", "notify", "fail", "report", "warning", "dismiss"}


@cache
def messages() -> dict[str, list[str]]:
    """Texts of each raise and warning of the package, by place and class of the error."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "lightning_hetero").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            kind = ""
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                kind = ast.unparse(node.exc.func)
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
                kind = name if name in TELLS else ""
            if kind and (texts := strings_in(node)):
                found[f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} {kind}"] = texts
    return found


@cache
def troubles() -> set[str]:
    """Pieces of messages that the page answers."""
    cells = [row[0] for row in rows((REFERENCE / "troubleshooting.md").read_text())]
    return {piece for cell in cells if cell.startswith("`") for piece in re.findall(r"`([^`]+)`", cell)}


REASONS = (
    "balanced/strategy.py", "stale/fit/refusals.py", "pipeline/fit/refusals.py", "federated/fit/refusals.py",
)  # each engine's `Refusals`


def test_every_message_in_troubleshooting_is_one_of_ours() -> None:
    source = [text for texts in messages().values() for text in texts]
    # These files also word what others raise or show.
    for file in (
        "balanced/decide/rows.py",
        "base/checks.py",
        "base/nodes.py",
        "stale/decide/report/summary.py",
        "federated/decide/rounds.py",
        "transport/roll_call.py",
        "lightning_compat/launchers.py",
        "pipeline/runtime/step/layer_calls/chain.py",
        "pipeline/fit/hints.py",
        *REASONS,
    ):
        source += strings_in(ast.parse((ROOT / "lightning_hetero" / file).read_text()))
    strange = {piece for piece in troubles() if not any(piece in text for text in source)}
    assert not strange


ENGINE_FOLDERS = ("balanced", "stale", "pipeline", "federated", "shares", "transport", "base", "data", "callbacks")
# What is raised in these files and folders answers a wrong call or message from inside the package; the server says it
# "makes no sense".
PROTOCOL = {
    "stale/decide": ("coordinator", "epoch", "intervals", "ledger", "simulate"),
    "stale/runtime": ("messages", "serve/agreement", "serve/push_checks", "serve/server", "work"),
    "transport": (
        "base", "merged", "seqlock", "sockets", "pairs/frames", "pairs/handshake", "pairs/listener",
        "shared_memory/listener",
    ),
    "pipeline/decide": ("plan_times", "schedule"),
    "pipeline/runtime": (
        "execute/stage_runner", "execute/whole_step", "measure/around_backbone", "measure/layers", "measure/memory",
        "measure/whole_step", "ownership/gradients", "ownership/migration", "ownership/owner_groups",
        "step/cut", "step/graph_input", "step/resumable",
    ),
}  # fmt: skip
INTERNAL = tuple(f"lightning_hetero/{part}/{name}" for part, names in PROTOCOL.items() for name in names)
WRONG_CALLS = (  # in other files, likewise
    "an area must be uint8", "keep has ", "members=", "rank=", "divide_by=", " optimizers, but the parameters of ",
    "optimizer_parameters names ", "call FlatLayout.adopt first", "its memory is damaged", "address=", "bytes [",
    "no parameters were published yet", " came instead of ", "unreachable",
    " must be whole numbers >= 1 that sum up to sample", "the head stands on the leader", "not its LoaderSpec",
    "a plan without groups", "StepLogs.send()", " increasing numbers from 0 to ",
)  # fmt: skip


def within(place: str, internal: str) -> bool:
    """Whether a place in the source is in that file, or in a file of that folder."""
    return place.startswith((f"{internal}.py:", f"{internal}/"))


def concerns_users(place: str, texts: list[str]) -> bool:
    wrong_call = any(call in text for call in WRONG_CALLS for text in texts)
    internal = wrong_call or any(within(place, one) for one in INTERNAL)
    return place.rpartition(" ")[2] in TELLS | {"DisagreementError"} or not internal


def test_every_error_of_the_engines_is_in_troubleshooting() -> None:
    ours = tuple(f"lightning_hetero/{folder}/" for folder in ENGINE_FOLDERS)
    unanswered = {
        place: texts
        for place, texts in messages().items()
        if place.startswith(ours)
        and concerns_users(place, texts)
        and not any(piece in text for piece in troubles() for text in texts)
    }
    assert not unanswered


def test_exemptions_are_used() -> None:
    """A rule that matches nothing any more hides the next message that it matches by accident."""
    everything = messages()
    for one in INTERNAL:
        assert any(within(place, one) for place in everything), one
    for call in WRONG_CALLS:
        assert any(call in text for texts in everything.values() for text in texts), call
