"""From what the ranks saw to rows, figures and a table; pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.kit.figures import DASH, figure, markdown
from benchmarks.peers.cases import CLUSTERS, GLOBAL_BATCH, PEERS, TARGET_LOSS, Run, key

STOCK, PLAIN = "stock DDP", "DDP, plain loop"
Row = dict[str, Any]


def to_target(curve: Sequence[Sequence[float]], target: float = TARGET_LOSS) -> list[float] | None:
    """Returns the first look whose validation loss is not above the target; None: there is none.

    Args:
        curve: updates, seconds, validation loss and accuracy of each look.
        target: validation loss.
    """
    return next((list(point) for point in curve if point[2] <= target), None)


def _seen(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns one run's numbers."""
    ranks = result["ranks"]
    first, curve = ranks[0], ranks[0]["curve"]
    reached = to_target(curve)
    samples = sum(sum(rank["samples"]) for rank in ranks)
    return {
        "target_s": reached and reached[1],
        "target_updates": reached and reached[0],
        "fit_s": max(rank["fit_s"] for rank in ranks),
        "loss": curve[-1][2],
        "accuracy": curve[-1][3],
        "updates": first["updates"],
        "samples": samples,
        "per_update": samples / first["updates"] if first["updates"] else None,
        "distance": first["distance"],
        "taken": max(rank["taken"] for rank in ranks),
    }


def rows_of(results: Mapping[str, Mapping[str, Any]], runs: Sequence[Run]) -> list[Row]:
    """Returns one row per cluster and peer that was run: medians over seeds, ratios of the same seed.

    A time to the target is a median only if every seed came there; ``reached`` says how many did.
    """
    rows: list[Row] = []
    for cluster in CLUSTERS:
        found: dict[str, dict[int, dict[str, float | None]]] = {}
        for run in runs:
            if run.cluster == cluster.name and "ranks" in results.get(key(run), {}):
                found.setdefault(run.peer, {})[run.seed] = _seen(results[key(run)])
        for peer in PEERS:
            if own := found.get(peer.name):
                rows.append(_row(cluster.name, peer.name, own, found))
    return rows


def _row(cluster: str, peer: str, own: dict[int, Any], found: dict[str, dict[int, Any]]) -> Row:
    def middle(field: str, to: dict[int, Any] | None = None) -> float | None:
        """The median over seeds, or that of ratios to another peer; None if a value is not there."""
        pairs = [(own[seed][field], 1.0 if to is None else to[seed][field]) for seed in own if to is None or seed in to]
        if not pairs or any(a is None or b is None for a, b in pairs):
            return None
        return statistics.median(a / b for a, b in pairs)

    fields = ("target_s", "target_updates", "fit_s", "loss", "accuracy", "updates", "samples", "per_update", "distance")
    times_s = [one["fit_s"] for one in own.values()]
    return {
        "cluster": cluster,
        "peer": peer,
        "seeds": len(own),
        "reached": sum(one["target_s"] is not None for one in own.values()),
        **{field: middle(field) for field in fields},
        "spread_s": max(times_s) - min(times_s),
        "target_to_ddp": middle("target_s", found.get(STOCK, {})),
        "target_to_plain": middle("target_s", found.get(PLAIN, {})),
        "fit_to_ddp": middle("fit_s", found.get(STOCK, {})),
        "taken": max(one["taken"] for one in own.values()),
    }


def failures(results: Mapping[str, Mapping[str, Any]], runs: Sequence[Run]) -> dict[str, str]:
    """Returns why a peer has no result, or not from every seed: peer -> reason."""
    found: dict[str, str] = {}
    for run in runs:
        if "failed" in results[key(run)]:
            found.setdefault(run.peer, results[key(run)]["failed"])
    return found


def figures_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns what is compared between peers; there are no goals: each is what it is."""
    units = {
        "target_s": (f"time to a validation loss of {TARGET_LOSS:g}", "s"),
        "target_to_ddp": ("that time to stock DDP's", "x"),
        "loss": ("validation loss in the end", ""),
        "accuracy": ("validation accuracy in the end", ""),
        "samples": ("samples computed", "samples"),
    }
    return [
        figure(f"{row['cluster']}, {row['peer']}: {name}", row[field], unit)
        for row in rows
        for field, (name, unit) in units.items()
        if row[field] is not None
    ]


def table(rows: Sequence[Row]) -> str:
    """Returns all of it as a Markdown table."""

    def number(form: str) -> Callable[[Any], str]:
        return lambda value: DASH if value is None else format(value, form)

    changes = {peer.name: peer.changes for peer in PEERS}
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("devices", lambda row: row["cluster"]),
        ("peer", lambda row: row["peer"]),
        ("to target [s]", lambda row: number(".2f")(row["target_s"])),
        ("seeds there", lambda row: f"{row['reached']} of {row['seeds']}"),
        ("updates to it", lambda row: number(".0f")(row["target_updates"])),
        ("to stock DDP's", lambda row: number(".2f")(row["target_to_ddp"])),
        ("to the plain loop's", lambda row: number(".2f")(row["target_to_plain"])),
        ("final loss", lambda row: number(".3f")(row["loss"])),
        ("accuracy", lambda row: number(".3f")(row["accuracy"])),
        ("whole run [s]", lambda row: number(".2f")(row["fit_s"])),
        ("range [s]", lambda row: number(".2f")(row["spread_s"])),
        ("updates", lambda row: number(".0f")(row["updates"])),
        ("samples computed", lambda row: number(".0f")(row["samples"])),
        (f"per update (DDP: {GLOBAL_BATCH})", lambda row: number(".1f")(row["per_update"])),
        ("off one process", lambda row: number(".0e")(row["distance"])),
        ("taken / asked", lambda row: number(".3f")(row["taken"])),
        ("changes in the recipe", lambda row: changes[row["peer"]]),
    ]
    return markdown([head for head, _ in columns], [[cell(row) for _, cell in columns] for row in rows])
