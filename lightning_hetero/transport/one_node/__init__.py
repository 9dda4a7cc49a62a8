"""Two processes of one node: memory that both map, and a socket that tells of it (layer T)."""
