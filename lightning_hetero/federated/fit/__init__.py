"""One federated fit inside Lightning (layer L).

``settings``  the strategy's arguments
``refusals``  what it refuses, with the reasons
``loaders``   each rank's own train loader, batch by batch
``meetings``  where all ranks meet and average
``common``    what the ranks average
``run``       what exists between set-up and teardown
"""
