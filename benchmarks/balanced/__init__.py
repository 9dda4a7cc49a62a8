"""Does load balancing pay: stock DDP, the folk fix, ours and the ideal, on emulated unequal devices and real ones."""
