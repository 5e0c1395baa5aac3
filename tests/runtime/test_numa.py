from __future__ import annotations

import ctypes
import mmap
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fxoffload.runtime.host_memory import numa

GPU = torch.device("cuda", 0)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nodes below ``nodes``, and a GPU at 0001:65:00.0 on node 1."""
    (tmp_path / "nodes").mkdir()
    device = tmp_path / "pci" / "0001:65:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    monkeypatch.setattr(numa, "_NODES", tmp_path / "nodes")
    monkeypatch.setattr(numa, "_PCI_DEVICES", tmp_path / "pci")
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x65, pci_device_id=0)
    monkeypatch.setattr(numa.torch.cuda, "get_device_properties", lambda device: properties)
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The nodes that the kernel was asked for."""
    nodes: list[int] = []
    monkeypatch.setattr(numa, "_prefer", lambda address, nbytes, node: nodes.append(node) is None)
    return nodes


def test_the_gpu_s_node_where_there_are_several(machine: Path, asked: list[int]) -> None:
    (machine / "nodes" / "has_memory").write_text("0-1\n")
    assert numa.node_of(GPU) == 1
    assert numa.prefer_node_of(GPU, 0, 4096) == 1
    assert asked == [1]


@pytest.mark.parametrize(
    ("nodes", "node"),
    [("0\n", "0\n"), ("0-1\n", "-1\n"), ("0-1\n", "7\n"), ("0-1\n", "what\n"), ("", "1\n")],
    ids=["one node", "not said", "a node without memory", "nonsense", "no list"],
)
def test_nothing_is_asked_for(machine: Path, asked: list[int], nodes: str, node: str) -> None:
    (machine / "nodes" / "has_memory").write_text(nodes)
    (machine / "pci" / "0001:65:00.0" / "numa_node").write_text(node)
    assert numa.prefer_node_of(GPU, 0, 4096) is None
    assert asked == []


def test_a_torch_that_does_not_know_the_bus(machine: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "nodes" / "has_memory").write_text("0-1\n")
    monkeypatch.setattr(numa.torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert numa.prefer_node_of(GPU, 0, 4096) is None
    assert numa.prefer_node_of(torch.device("cpu"), 0, 4096) is None
    assert asked == []


def test_lists_of_nodes(machine: Path) -> None:
    assert numa.memory_nodes() == []
    (machine / "nodes" / "online").write_text("0-1,4,6-7\n")
    assert numa.memory_nodes() == [0, 1, 4, 6, 7]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of get_mempolicy is that of x86-64")
def test_the_kernel_takes_the_policy_and_refuses_a_node_that_is_not_there() -> None:
    with mmap.mmap(-1, 8 << 20) as held:
        whole = ctypes.c_char.from_buffer(held)
        address = ctypes.addressof(whole)
        if not numa._prefer(address, 8 << 20, numa.memory_nodes()[0]):
            pytest.skip("this machine does not allow mbind")
        mode = ctypes.c_int(-1)
        nodes = (ctypes.c_uint64 * 16)()
        of_address = 2
        assert ctypes.CDLL(None).syscall(
            ctypes.c_long(239), ctypes.byref(mode), nodes, ctypes.c_ulong(1024), ctypes.c_void_p(address),
            ctypes.c_ulong(of_address),
        ) == 0  # fmt: skip
        assert (mode.value, nodes[0]) == (1, 1 << numa.memory_nodes()[0])
        assert not numa._prefer(address, 8 << 20, 900)
        del whole
