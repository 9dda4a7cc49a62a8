"""Processes of one node: mapped slots, a unix socket as doorbell (layer T)."""
