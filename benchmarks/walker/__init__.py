"""What the pipeline engine's walker costs beside `torch.distributed.pipelining`, where that is at its best."""
