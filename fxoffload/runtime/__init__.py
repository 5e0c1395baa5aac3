"""What happens while a step runs: host memory, copies, the tape and the executor. Knows no pass."""
