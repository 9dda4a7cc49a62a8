"""Engine 2, after SaPS: DDP's recipe on a parameter server that bounds staleness and waits for nobody.

words   ``protocol``, ``flags``  (P)   what workers, server and coordinator say to one another
decide  ``coordinator``  (P)   who gets which samples, who is held, when a batch is complete: ``policy/``,
                         ``dispatch``, ``sizing``, ``speeds``, ``roster``; books: ``epoch``, ``ledger``, ``spans``
serve   ``server``       (T)   ``intake``, ``effects``, ``outbox``, ``substeps``, ``agreement``; gradients:
                         ``tickwork``, ``pool``, ``update``, ``shards``; its process: ``start``, ``process``, ``codec``
work    ``worker``       (T)   ``replica``, ``slot``, ``work``; what both ends share: ``layout``, ``compress``,
                         ``hyper``, ``norms``, ``amp``, ``pinned``
hooks   ``strategy``     (L)   ``elastic``, ``refusals``; one fit: ``run``, ``session``, ``loaders``, ``meetings``,
                         ``join``, ``regroup``; one batch: ``loop``, ``claims``, ``takeover``; ``launcher``
see     ``meters``, ``report``   (P)   and without hardware: ``simulator``, ``simulated_speeds``, ``trace``
"""
