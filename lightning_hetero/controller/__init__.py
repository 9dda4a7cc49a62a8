"""The online controller: shares and stages decided again while training, under a long-term budget (layer P).

"Joint dynamic data and model parallelism" (TPDS 36(2), 2025), known to us by its abstract, names the ingredients:
uneven data, communication-aware partitions, groups, time-averaged constraints, Lyapunov's method, tentative search. The
derivation and all formulas here are ours:

    measured      stages free of waiting, links                            `estimates`
    overspent     prices, and a virtual queue per constraint, with a bank  `spending`
    minimised     V T + sum of queues times use, migrations amortised      `objective`
    each batch    samples per group, exact, guarded                        `share_guard`
    on a change   structure, by tentative search                           `triggers`, `solvers.placement.search`
    afterwards    rolled back if measured worse than promised              `trials`

A change is what triggers, never a fixed slot: how late a change is answered costs more than how well. Pure: the same
object decides in training, in simulators and in planners, for any engine whose ranks form pipelines, or pipelines of
one stage each, which is data parallelism.
"""
