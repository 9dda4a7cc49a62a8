"""Federated clients on unequal devices: time to a target accuracy under four policies."""
