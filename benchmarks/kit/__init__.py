"""What all benchmarks are made of: figures, one runner, the starting of ranks, trainings on emulated devices."""
