"""The pipeline engine: unequal stages inside a group, unequal data across groups (after Joint Dynamic DP+MP)."""
