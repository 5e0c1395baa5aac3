"""Phases of RL post-training: parameters, gradients and optimizer state leave the GPU and return."""
