"""Runs steps: host memory, copies, the save order and the executor. Knows no pass."""
