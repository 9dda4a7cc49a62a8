"""The tables of docs/theory/stale_policies.md, from the results."""

from __future__ import annotations

from typing import Any

from benchmarks.results import DASH, Results

NAMES = {
    "bsp (stock DDP)": "`bsp`: stock DDP",
    "flexible": "`flexible`, the default",
    "joining": "`joining`: late samples join the next update",
    "aged": "`aged`: late samples count 1/4 per version",
    "quorum": "`quorum`, more than half",
    "backup spares=1": "`backup`, 1 spare",
    "buffered k=2, bound=4": "`buffered`, 2 of 4",
    "ssp bound=8": "`ssp`, lead of 8",
    "asp": "`asp`",
    "dynsgd": "`dynsgd`",
}
CLUSTERS = {"equal": "calm", "1:1:1:1/8": "one straggler", "spells": "spells"}


def rows_of(results: Results, model: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the rows of one model by cluster and policy."""
    return {(row["case"], row["policy"]): row for row in results.raw["rows"] if row["model"] == model}


def table_of(results: Results) -> str:
    """Returns a table per optimizer: time to the target and final loss, over DDP's, cluster by cluster."""
    parts: list[str] = []
    for model in dict.fromkeys(row["model"] for row in results.raw["rows"]):
        rows = rows_of(results, model)
        cases = list(dict.fromkeys(case for case, _ in rows))
        head = [model, *(f"{CLUSTERS[case]}: time, final loss" for case in cases)]
        lined = [head, ["---"] * len(head)]
        for policy in dict.fromkeys(policy for _, policy in rows):
            cells = [NAMES[policy]]
            for case in cases:
                row = rows[case, policy]
                time = row["target_to_ddp"]
                reached = DASH if time is None else f"{time:.2f}"
                error = f" +- {row['error']:.2f}" if row["error"] else ""
                cells.append(f"{reached}, {row['loss_to_ddp']:.2f}{error}")
            lined.append(cells)
        parts.append("\n".join("| " + " | ".join(cells) + " |" for cells in lined))
    return "\n\n".join(parts)
