"""What structures there are, what they are worth, and how to get from one to another (layer P)."""
