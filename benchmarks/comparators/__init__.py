"""The stale engine's policies side by side: training loss against emulated time."""
