"""What it costs to compare the ranks' parameters."""
