"""What a recorded run says: figures from its events, and a page of them (layer P, above the engines).

    run         events of a trace -> `Run`: steps of all ranks on one clock, changes, plans, counts
    waiting     who worked, who waited, for whom
    stage_times what each rank spends in each stage of a step: one rank, one stage, or all
    what_if     other engines, a mended rank, fewer cards: the engines' own decide code on the recorded times
    scores      who is slow beside the others, and beside itself
    changes     what changes of shares or plan promised, and what they gave
    stages      pipelines: the schedule, its bubbles, stages beside their plan
    verdict     in a few sentences: how long was waited, why, what to do
    compare     run A beside run B
    perfetto    the same events for https://ui.perfetto.dev
    page/       all of it as one HTML file

Nothing is modelled here: times of other splits come from `cluster`, `solvers`, the engines' ``decide``.
"""
