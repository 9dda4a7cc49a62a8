"""Engine 2, after SaPS: DDP's recipe on a parameter server that bounds staleness and waits for nobody.

``strategy``  (L) what users name; ``policy`` and ``compress`` are what they may pass to it
``fit``       (L) one fit inside Lightning: the run, its session with a server, loaders, the ticks of an epoch
``runtime``   (T) server, workers, flat memory and processes: carries out what was decided
``decide``    (P) who gets which samples, who is held, when a batch is an update; policies, simulator, reports
"""
