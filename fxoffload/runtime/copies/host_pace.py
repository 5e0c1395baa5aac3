"""Whether the host waits for the device in the middle of forwards, as where a dropless MoE reads its counts.

[Note: Host pace]
A host that only launches runs ahead: when it offloads values of a segment, the kernels of the segment before are rarely
done. A host that reads from the device has waited for them each time. Its read is a small copy, which would wait for
all copies of ours that are queued before it: only then do they give way ([Note: Giving way]). Giving way is not free.
During a training step, copies of two streams in turn carried 50.8 GB/s of 55, and a step of layers compiled one by one
took 769.8 instead of 752.7 ms (`2026-11-23-h200-copies-ablation.json`).

A host that is late finds the device idle too, and giving way costs it time: 20 us for each turn. Stock models under
FSDP2 have such hosts. Transformers reads whether the batch is packed, which waits for the device. A layer then takes
the host 3 to 6 ms, and the device 6.4. Where copies gave way to nothing, forwards took 143 and 151 ms instead of 139
and 141, with and without pacing, and single ones 0.8 s (two H200s,
``archive/2026-11-29-2xh200-stock-fsdp-giving-way.json``). So copies to the host do not give way in a process with
FSDP2. Its own small copies go to the device.
"""

from __future__ import annotations

from collections import deque

from fxoffload.torch_private.fsdp2 import fsdp2_is_used

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
        """Whether the device was idle at most of the last looks. The first few of a step always find it so. Never with
        FSDP2."""
        return 2 * sum(self._found_idle) > _LOOKED_AT and not fsdp2_is_used()
