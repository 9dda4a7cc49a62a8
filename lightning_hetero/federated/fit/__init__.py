"""One federated fit inside Lightning (layer L).

``settings``     the strategy's arguments, and what it refuses
``loaders``      each rank's own train loader, batch by batch
``local_steps``  what this rank trains between two averages
``rounds``       where the ranks are in an epoch and in a round, and what the policy divides among those that are there
``averaging``    what the ranks average
``run``          what exists between set-up and teardown
"""
