"""Late contributions that complete the update they missed, against the mean they join."""
