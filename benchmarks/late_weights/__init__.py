"""What a late contribution should be worth at the edge of stability, by ablation."""
