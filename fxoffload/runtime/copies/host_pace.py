"""Whether the host waits for the device in the middle of forwards, as where a dropless MoE reads its counts.

[Note: Host pace]
A host that only launches runs ahead: when it offloads values of a segment, the kernels of the segment before are rarely
done. A host that reads from the device has waited for them each time. Its read is a small copy, which would wait for
all copies of ours that are queued before it: only then do they give way ([Note: Giving way]). Giving way is not free.
During a training step, copies of two streams in turn carried 50.8 GB/s of 55, and a step of layers compiled one by one
took 769.8 instead of 752.7 ms (`2026-11-23-h200-copies-ablation.json`).
"""

from __future__ import annotations

from collections import deque

_LOOKED_AT = 16


class HostPace:
    """Of one device; its caller holds a lock."""

    def __init__(self) -> None:
        self._found_idle: deque[bool] = deque(maxlen=_LOOKED_AT)

    def looked(self, *, idle: bool) -> None:
        """``idle``: all work is done that the host had launched at its last look."""
        self._found_idle.append(idle)

    @property
    def waits(self) -> bool:
        """Whether the device was idle at most of the last looks. The first few of a step always find it so."""
        return 2 * sum(self._found_idle) > _LOOKED_AT
