"""What each engine would give on a cluster, before anybody trains (layer P).

``setup``      `Setup`: devices, costs and batch that are asked about, also from the trace of a run
``estimate``   `Estimate`: what one engine would take, its bound, reasons and arguments
``parallel``   stock DDP and the balanced engine: its own policy, until its shares stay
``stale``      the stale engine: ranks that never wait, and the server's port
``pipelines``  the pipeline engine: its own planner
``planner``    `plan`: all of them, ranked, and which to take
``formula``    costs of a model from its sizes
``paste``      an estimate as Python

Nothing is modelled here that training models too: shares and plans come from the engines' ``decide`` and from
``solvers``.
"""
