"""Runs steps: host memory, copies, the tape and the executor. Knows no pass."""
