"""Engine 1, after LB-BSP: synchronous, with per-rank batches re-sized so that all ranks finish together.

measure   ``cluster.clock``    own work per step, free of waiting
exchange  ``transport.side_channel``  a few numbers per rank, never waited for
predict   ``policy``     (P)   + ``predictors``
decide    ``policy``     (P)   + ``solvers``; which record may decide which batch: ``controller`` (P)
apply     ``loaders``    (L)   + ``data``: shares become parts; ``weighting`` (T): parts become exact gradients
hooks     ``strategy``   (L)   , ``run``: one fit
"""
