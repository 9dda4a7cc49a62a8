"""The online controller at work without hardware: changing clusters, batches operation by operation."""
