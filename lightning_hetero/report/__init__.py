"""What a recorded run says: figures from its events, and a page of them (layer P, above the engines).

    run        events of a trace -> `RecordedRun`: steps of all ranks on one clock, changes, plans, counts
    figures    loss and throughput over time; who is slow, compared with the others and with itself, or between steps; a
               pipeline's schedule, its bubbles, stages compared with their plan; other engines, by the planner; events
               for https://ui.perfetto.dev
    verdict    in words: how long was waited, why, what to do
    page/      all of it as one HTML file

Nothing is modelled here: times of other splits come from `lightning_hetero.plan`.
"""
