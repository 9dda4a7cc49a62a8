"""What each rank does between two averages (layer P).

``rounds``    a rank's way through the batches of an epoch; what ranks tell each other when they meet; loggers' numbers
``policy``    batch sizes, local steps and learning rates of a round; least and most samples of a local step
"""
