"""What each rank does between two averages (layer P).

``rounds``    a rank's way through the slots of an epoch; what ranks tell each other when they meet
``bounds``    least and most samples of a local step, by memory and by the data that a rank has
``policy``    batch sizes, local steps and learning rates of a round
``report``    numbers for loggers
"""
