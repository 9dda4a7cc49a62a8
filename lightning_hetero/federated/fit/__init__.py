"""One federated fit inside Lightning (layer L).

``settings``  the strategy's arguments
``refusals``  what it refuses, with the reasons
``loaders``   each rank's own train loader, batch by batch
``meetings``  where all ranks meet and average
``common``    what the ranks average
``division``  what those who are there train on, and what the policy divides among them
``clients``   where clients may be lost and come again: who is there, collectives for all of them or for none
``run``       what exists between set-up and teardown
"""
