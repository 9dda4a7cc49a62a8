"""Ranks that are lost, and ranks that join a running fit, whatever the engine (layer L).

``ddp``        the strategy: DDP whose collectives are among those that are left
``members``    who takes part
``meetings``   what the ranks do together, or not at all; process groups without the lost, or with who has come
``join``       a rank that comes late, or again: how it and the members find each other
``admission``  the members' side of it
``coming``     what both say to each other in the store where their new process group meets
"""
