"""Objects that a forked child keeps for good: CUDA events of its parent.

torch's event sets the device when it is destroyed. In a forked child that raises, in a destructor, and so aborts the
child: a DataLoader's worker, say. Objects that hold such events, and would be dropped there, are kept instead.
Garbage that the collector had not found when the process was forked is left alone (``fxoffload.gc_pause``).
"""

from __future__ import annotations

_kept: list[object] = []


def keep_for_good(objects: object) -> None:
    """Hold ``objects`` as long as this process lives."""
    _kept.append(objects)
