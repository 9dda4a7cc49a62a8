"""Engine 2, after SaPS: DDP's recipe on a parameter server that bounds staleness and waits for no straggler.

``strategy``  (L) what users name; ``policy`` is what they may pass to it
``fit``       (L) one fit inside Lightning: the run, its session with a server, loaders, the global steps of an epoch
``runtime``   (T) server, workers, flat memory and processes: carries out what was decided
``decide``    (P) who gets which samples, who is held, when a batch is an update; policies, reports
"""
