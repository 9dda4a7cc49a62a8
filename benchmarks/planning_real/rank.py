"""Starts one rank: binds it to its core and sets its clock, before torch has threads and anybody has a clock.

By the processor's clock a process reads, wherever it asks for the time, the processor time it has used: programs at
work beside it do not count, nor does waiting. So work can be compared on a busy machine, steps and links cannot.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time


def main() -> None:
    setting = json.loads(sys.argv[2])
    core = setting["cores"][int(os.environ["LOCAL_RANK"])]
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})
    if setting["clock"] == "processor":
        time.perf_counter = time.process_time
    importlib.import_module("benchmarks.planning_real.worker").main()


if __name__ == "__main__":
    main()
