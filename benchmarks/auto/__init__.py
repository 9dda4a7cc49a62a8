"""What `AutoStrategy` takes, against the best of the engines, whole runs."""
