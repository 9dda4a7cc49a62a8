"""``python -m benchmarks.walker [--quick]``: ours against `torch.distributed.pipelining`, where that is best.

One chain of four equal stages, no link emulated: once with emulated devices, once with real work alone. It is the part
*overhead* of `benchmarks.pipeline`, in about two minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.pipeline.__main__ import launch
from benchmarks.pipeline.figures import overhead_figures, overhead_table
from benchmarks.report import write_results

NOTES = (
    "Four processes share two cores, one thread each; both train the same layers with 16 micro-batches, one after the"
    " other in the same processes. *torch*: textbook 1F1B, loss and head on the last stage. *Ours*: the schedule that"
    " is generated from the links as the strategy's probe finds them; the training step is suspended on the first"
    " stage, where loss and head are computed, too. Ratios are medians over pairs of runs.\n\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one pair of runs; under a minute")
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs, less two")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for results.json, results.md")
    args = parser.parse_args()
    raw = launch(4, 1 if args.quick else args.repeats, 3, 3, "overhead")["overhead"]
    title = "The pipeline engine's walker compared with torch.distributed.pipelining"
    notes = NOTES + overhead_table(raw)
    write_results(args.out, title=title, figures=overhead_figures(raw), raw=raw, notes=notes)


if __name__ == "__main__":
    main()
