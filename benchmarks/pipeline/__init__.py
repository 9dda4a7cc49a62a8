"""Do uneven pipelines pay: even pipelines, stock DDP, the balanced engine, ours and the bound, on emulated clusters."""
