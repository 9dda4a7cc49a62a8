"""Engine 1, after LB-BSP: synchronous, with per-rank batches re-sized so that all ranks finish together.

``strategy``  L  the class users name
``fit``       L  one fit: loaders, the stopwatch around a step, the handle on the policy
``runtime``   T  parts become exact gradients
``decide``    P  which rank gets how many samples, and which measurement may decide which batch
"""
