"""What it costs to be watched: steps with a `StragglerMonitor` against steps without."""
