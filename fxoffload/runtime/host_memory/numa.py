"""Host memory near the GPU: copies from a far memory node were seen at a third of the rate."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path

import torch

log = logging.getLogger(__name__)

_NODES = Path("/sys/devices/system/node")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_SYS_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1  # other nodes serve where this one is full; a strict policy would kill the process instead


def prefer_node_of(device: torch.device, address: int, nbytes: int) -> int | None:
    """Take the pages of a mapping from the memory node of ``device``. Returns the node; None where nothing was done."""
    nodes = memory_nodes()
    if len(nodes) < 2:
        return None
    node = node_of(device)
    if node not in nodes:
        log.debug("%s is on memory node %s, of %s: host memory is taken from anywhere", device, node, nodes)
        return None
    return node if _prefer(address, nbytes, node) else None


def memory_nodes() -> list[int]:
    """The nodes that have memory; empty where the machine does not say."""
    for name in ("has_memory", "online"):
        try:
            return _parse_list((_NODES / name).read_text())
        except (OSError, ValueError):
            continue
    return []


def cpus_of(node: int) -> set[int]:
    """The CPUs of a memory node; empty where the machine does not say."""
    try:
        return set(_parse_list((_NODES / f"node{node}" / "cpulist").read_text()))
    except (OSError, ValueError):
        return set()


def node_of(device: torch.device) -> int | None:
    """The memory node that a GPU is attached to; None where the machine or torch does not say."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    bus = getattr(properties, "pci_bus_id", None)
    if bus is None:
        return None
    domain, slot = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
    try:
        node = int((_PCI_DEVICES / f"{domain:04x}:{bus:02x}:{slot:02x}.0" / "numa_node").read_text())
    except (OSError, ValueError) as error:
        log.debug("the memory node of %s is not known: %s", device, error)
        return None
    return node if node >= 0 else None


def _prefer(address: int, nbytes: int, node: int) -> bool:
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        log.debug("mbind has no number for %s", platform.machine())
        return False
    words = node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_ulong(_MPOL_PREFERRED),
        ctypes.byref(mask),
        ctypes.c_ulong(64 * words + 1),  # the kernel reads one bit less than it is told
        ctypes.c_ulong(0),
    )
    if result != 0:
        log.debug("mbind to memory node %d refused: %s", node, os.strerror(ctypes.get_errno()))
    return result == 0


def _parse_list(text: str) -> list[int]:
    """The numbers of a kernel list: "0-1,4" is 0, 1, 4."""
    found: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.extend(range(int(first), int(last or first) + 1))
    return found
