"""Which rank gets how many samples: the policy, and which measurement may decide which batch (layer P)."""
