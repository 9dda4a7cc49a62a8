"""The sharded engine against stock `ModelParallelStrategy`, static parts weighted by hand, and the pipeline engine."""
