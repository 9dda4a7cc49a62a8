"""Deterministic fault simulation of the stale engine: the real server, coordinator, meetings, admission and workers on
a virtual clock and an in-memory transport, and an adversary that hits them by a seed.

    cases       a seed -> cluster, policy, training, faults and where they hit
    world       virtual clock, processes as greenlets
    wires       the transport in memory: delays, order between ranks, ends of connections
    ranks       what a rank does, over the engine's own `Worker`, `Session`, `Meetings`, `Admission`
    audit       every sample once, none beyond the bound: read from the published parameters
    simulation  one run, and what is wrong with its end
"""
