"""Objects that a forked child keeps for good: CUDA events of its parent.

torch's event sets the device when it is destroyed. In a forked child that raises, in a destructor, and so aborts the
child: a DataLoader's worker, say. Objects that hold such events, and would be dropped there, are kept instead.
Garbage that the collector had not found when the process was forked is left alone (``fxoffload.gc_pause``).
"""

from __future__ import annotations

import os

_generation = 0
_kept: list[object] = []


def generation() -> int:
    """Grows with every fork, in the child."""
    return _generation


def keep_if_forked(since: int, held: object) -> bool:
    """Hold ``held`` as long as this process lives, if it was forked since ``since``, a ``generation`` (-1: hold it in
    any case). Returns whether it was."""
    if since == _generation:
        return False
    _kept.append(held)
    return True


def _after_fork_in_child() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_after_fork_in_child)
