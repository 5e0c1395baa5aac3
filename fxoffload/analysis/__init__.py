"""What graphs cost: times of operators and kernels, memory of segments, ways to recompute."""
