"""What each layer costs: time, bytes kept, bytes sent (layer T)."""
