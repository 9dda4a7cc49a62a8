"""Batches of skewed lengths on equal devices: steps against stock DDP's, and who is taken for slow."""
