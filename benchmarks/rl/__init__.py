"""The scenarios of RL phases: ``pinning``, ``phases``, ``weight-sync`` and ``rl-step``."""
