"""Samples per rank: predict, solve, and change only when it pays; what engines that re-size batches share (layer P).

``policy``  `BalancePolicy`: predictors, the min-max split, dead band
``guard``   `RegretGuard`: never slower than equal shares, except by what was saved
``bounds``  `ShareBounds`: least and most samples per rank
``caps``    what a rank's memory holds
``items``   work counted in items, in samples
"""
