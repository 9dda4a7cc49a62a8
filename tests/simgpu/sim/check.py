"""Proof, from what was issued in a run, that NCCL cannot hang: `check` tells what is wrong.

Each rank issues operations one after another. An operation ends when every participant has issued its part, and when
what NCCL may do first has ended: on the same rank, all that was issued before on the same communicator; or, if kernels
of a device cannot run beside one another (``serial``), all that was issued before on any communicator. What the host
knew to have ended when it issued an operation is no constraint. Operations that wait for one another in a circle may
hang, even if they did not in this run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Node = tuple[object, ...]


@dataclass(frozen=True)
class Entry:
    """What a rank did.

    Attributes:
        kind: ``"op"``: it issued an operation; ``"known"``: its host saw that the operation has ended.
        issue: number of the operation on its rank.
        communicator: its name.
        ranks: of the communicator.
        op: the operation's name.
        peer: rank at the other end of a point-to-point operation.
        shapes: shapes and dtypes of its tensors; empty: they may differ.
        place: where in the code.
        thread: which issued it.
    """

    kind: str
    issue: int
    communicator: str = ""
    ranks: tuple[int, ...] = ()
    op: str = ""
    peer: int | None = None
    shapes: tuple[tuple[tuple[int, ...], str], ...] = ()
    place: str = ""
    thread: str = ""


def check(logs: Mapping[int, Sequence[Entry]], *, serial: bool) -> list[str]:
    """Returns what is wrong with a run, in words; nothing: NCCL cannot hang because of its order.

    Args:
        logs: by rank, what it did, in order.
        serial: also where kernels of a device run one after the other.
    """
    node_of, parts = _matched(logs)
    wrong = [text for node, those in parts.items() for text in _mismatches(node, those)]
    if not wrong:
        for one_after_the_other in (False, True) if serial else (False,):
            circle = _circle(_needs(logs, node_of, one_after_the_other))
            if circle:
                how = "kernels of a device one after the other" if one_after_the_other else "a stream per communicator"
                steps = " -> ".join(f"{node[0]} {node[1:]} at {_places(parts[node])}" for node in circle)
                wrong.append(f"operations may wait for one another in a circle ({how}): {steps}")
    return wrong


def _matched(logs: Mapping[int, Sequence[Entry]]) -> tuple[dict[tuple[int, int], Node], dict[Node, dict[int, Entry]]]:
    """Returns the node of each (rank, issue), and the parts of each node."""
    node_of: dict[tuple[int, int], Node] = {}
    parts: dict[Node, dict[int, Entry]] = defaultdict(dict)
    for rank, log in logs.items():
        seen: Counter[Node] = Counter()
        for entry in log:
            if entry.kind != "op":
                continue
            if entry.op in ("send", "recv"):
                assert entry.peer is not None
                ends = (rank, entry.peer) if entry.op == "send" else (entry.peer, rank)
                way: Node = ("message", entry.communicator, *ends)
            else:
                way = ("collective", entry.communicator)
            node = (*way, seen[way])
            seen[way] += 1
            node_of[rank, entry.issue] = node
            parts[node][rank] = entry
    return node_of, parts


def _mismatches(node: Node, parts: Mapping[int, Entry]) -> list[str]:
    wrong: list[str] = []
    message = node[0] == "message"
    wanted = {node[2], node[3]} if message else set(next(iter(parts.values())).ranks)
    where = _places(parts)
    if set(parts) != wanted:
        wrong.append(f"{node}: issued by ranks {sorted(parts)} of {sorted(map(str, wanted))} only: {where}")
    if not message and len({part.op for part in parts.values()}) > 1:
        wrong.append(f"{node}: several operations {sorted({part.op for part in parts.values()})}: {where}")
    elif len({part.shapes for part in parts.values()}) > 1:
        wrong.append(f"{node}: shapes or dtypes differ {[part.shapes for part in parts.values()]}: {where}")
    return wrong


def _places(parts: Mapping[int, Entry]) -> str:
    return ", ".join(f"rank {rank} {part.op} {part.place}" for rank, part in sorted(parts.items()))


def _needs(
    logs: Mapping[int, Sequence[Entry]], node_of: Mapping[tuple[int, int], Node], serial: bool
) -> dict[Node, set[Node]]:
    """Returns, for each node, those that must end first."""
    needs: dict[Node, set[Node]] = defaultdict(set)
    for rank, log in logs.items():
        under_way: dict[int, Entry] = {}
        for entry in log:
            if entry.kind == "known":
                under_way.pop(entry.issue, None)
                continue
            me = node_of[rank, entry.issue]
            for other in under_way.values():
                if serial or other.communicator == entry.communicator:
                    needs[me].add(node_of[rank, other.issue])
            needs[me].discard(me)
            under_way[entry.issue] = entry
    return needs


def _circle(needs: Mapping[Node, set[Node]]) -> list[Node]:
    """Returns nodes that need one another in a circle; empty: there are none."""
    done: set[Node] = set()
    for first in list(needs):
        if first in done:
            continue
        path, position = [first], {first: 0}
        open_ones = [iter(sorted(needs.get(first, ()), key=repr))]
        while path:
            following = next(open_ones[-1], None)
            if following is None:
                done.add(path[-1])
                del position[path.pop()]
                open_ones.pop()
            elif following in position:
                return [*path[position[following] :], following]
            elif following not in done:
                position[following] = len(path)
                path.append(following)
                open_ones.append(iter(sorted(needs.get(following, ()), key=repr)))
    return []
