"""``fxoffload doctor``: its findings and its messages."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from fxoffload import doctor
from fxoffload.cli.app import app
from fxoffload.machine.devices import Identity
from fxoffload.machine.shelf import load_profile

GIB = 1 << 30


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with an H200, of another driver than the shipped profile's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=140 * GIB))
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    here = Identity("NVIDIA H200", "cuda", "590.1", torch.__version__)
    for name in ("identify", "resolve"):
        monkeypatch.setattr(doctor, name, lambda device: here)
    monkeypatch.setattr(doctor, "profile_for", lambda device, allow_measure: load_profile("h200"))
    monkeypatch.setattr(doctor, "default_host_budget_bytes", lambda: 200 * GIB)
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: SimpleNamespace(total=256 * GIB, available=220 * GIB))
    monkeypatch.setattr(doctor, "memory_nodes", lambda: [0])


def findings() -> dict[str, doctor.Finding]:
    return {f.subject: f for f in doctor.examine()}


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_a_gpu() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    found = {f["subject"]: f for f in json.loads(done.output)}
    assert done.exit_code == 0
    assert "nothing is offloaded. Planning works" in found["GPU"]["advice"]
    assert "a100 (data sheet), " in found["profiles to plan with"]["found"]
    assert found["profiles to plan with"]["found"].endswith("h200 (measured)")
    shown = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and "models can be planned, and compiled models offload nothing" in shown.output


@pytest.mark.usefixtures("no_gpu")
def test_something_broken_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOFFLOAD_DISABLED", "1")
    done = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert done.exit_code == 1 and "1 of 12 need a look" in done.output


@pytest.mark.usefixtures("h200")
def test_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    found = findings()
    assert found["GPU 0"].found == "NVIDIA H200, 100.0 GiB of 140.0 GiB free, driver 590.1"
    assert found["profile"].found.startswith("NVIDIA H200, of driver 580")
    assert found["link"].found == "55.3 GB/s to the host, 55.5 back; both at once 50.7 and 52.0"
    assert not [f for f in found.values() if f.problem]


@pytest.mark.usefixtures("h200")
def test_a_profile_from_a_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    sheet = dataclasses.replace(load_profile("a100"), device_name="NVIDIA H200")
    monkeypatch.setattr(doctor, "profile_for", lambda device, allow_measure: sheet)
    found = findings()["profile"]
    assert found.found == "NVIDIA H200 (profile from a data sheet, not measured)"
    assert found.advice.startswith("unset FXOFFLOAD_PROFILE: then this GPU is measured")


@pytest.mark.usefixtures("h200")
def test_what_would_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setenv("FXOFFLOAD_DISABLED", "1")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "default_host_budget_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(doctor, "memory_nodes", lambda: [0, 1])
    monkeypatch.setattr(doctor, "node_of", lambda device: 1)
    monkeypatch.setattr(doctor, "cpus_of", lambda node: {1 << 20})
    monkeypatch.setattr(doctor, "profile_for", lambda device, allow_measure: 1 / 0)
    found = findings()
    assert "install g++" in found["C++ compiler"].problem
    assert "pip install triton" in found["Triton"].problem
    assert "little beside the GPU's 140.0 GiB" in found["memory to pin"].advice
    assert "numactl --cpunodebind=1" in found["node of GPU 0"].advice
    assert "expandable_segments:True leaves fewer gaps" in found["allocator"].advice
    assert "nothing reads FXOFFLOAD_DISABLED" in found["variables"].problem
    assert found["profile"].problem == "could not be looked at: ZeroDivisionError: division by zero"
