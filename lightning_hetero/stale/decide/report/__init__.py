"""What the server counted, and what that says to people (layer P)."""
