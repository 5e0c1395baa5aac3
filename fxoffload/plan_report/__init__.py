"""What ``fxoffload.explain()`` says: what was planned, what happened, and what to change."""
