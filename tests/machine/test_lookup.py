from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fxoffload
from fxoffload.errors import OptionsError, ProfileError, UnsupportedError
from fxoffload.machine import MachineProfile, cache, devices, load_profile, lookup, profile_for
from fxoffload.machine.devices import Identity, identify
from tests.machine.example import example, example_of
from tests.support import Stack, batch, compiled

CPU = torch.device("cpu")


class Measurements:
    """Stands for measuring: counts, and gives another profile each time."""

    def __init__(self) -> None:
        self.devices: list[torch.device] = []
        self.seconds = 0.0

    def __call__(self, device: torch.device) -> MachineProfile:
        self.devices.append(device)
        time.sleep(self.seconds)
        return example_of(identify(device), notes=f"measurement {len(self.devices)}")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measurements:
    found = Measurements()
    monkeypatch.setattr(lookup, "measure", found)
    return found


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A machine with an H200, as far as finding a profile goes."""
    device = torch.device("cuda", 0)
    identity = Identity("NVIDIA H200", "cuda", "999.1", str(torch.__version__))
    monkeypatch.setattr(lookup, "resolve", lambda _: device)
    monkeypatch.setattr(lookup, "identify", lambda _: identity)
    return device


def kept_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


class TestCache:
    def test_measured_once_and_kept(self, measured: Measurements, cache_folder: Path) -> None:
        first = fxoffload.profile("cpu")
        assert fxoffload.profile("cpu") == first
        assert profile_for("cpu", allow_measure=False) == first
        assert measured.devices == [CPU]
        (file,) = kept_files(cache_folder)
        assert load_profile(file) == first
        assert not [p for p in cache_folder.iterdir() if p.suffix not in (".json", ".lock")]

    def test_refresh(self, measured: Measurements) -> None:
        fxoffload.profile("cpu")
        again = fxoffload.profile("cpu", refresh=True)
        assert again.notes == "measurement 2"
        assert fxoffload.profile("cpu") == again

    @pytest.mark.parametrize("field", ["device_name", "driver", "torch_version"])
    def test_another_machine_is_measured(
        self, measured: Measurements, cache_folder: Path, monkeypatch: pytest.MonkeyPatch, field: str
    ) -> None:
        first = fxoffload.profile("cpu")
        before = identify(CPU)
        with monkeypatch.context() as other:
            other.setattr(lookup, "identify", lambda _: dataclasses.replace(before, **{field: "another"}))
            fxoffload.profile("cpu")
        assert len(measured.devices) == 2
        assert len(kept_files(cache_folder)) == 2
        assert fxoffload.profile("cpu") == first

    def test_the_version_of_torch_is_in_the_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = cache.path_of(identify(CPU))
        monkeypatch.setattr(torch, "__version__", "9.9.9")
        assert cache.path_of(identify(CPU)) != before

    def test_the_number_of_threads_is_in_the_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = cache.path_of(identify(CPU))
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
        assert cache.path_of(identify(CPU)) != before

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b'{"schema": 99}', b"[]"])
    def test_a_damaged_file_is_measured_again(
        self, measured: Measurements, cache_folder: Path, caplog: pytest.LogCaptureFixture, content: bytes
    ) -> None:
        fxoffload.profile("cpu")
        (file,) = kept_files(cache_folder)
        file.write_bytes(content)
        with caplog.at_level(logging.DEBUG, "fxoffload"):
            found = fxoffload.profile("cpu")
        assert found.notes == "measurement 2"
        assert load_profile(file) == found
        assert "the kept profile cannot be used" in caplog.text

    def test_another_device_s_file_is_measured_again(
        self, measured: Measurements, cache_folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        fxoffload.profile("cpu")
        (file,) = kept_files(cache_folder)
        file.write_text(load_profile("h200").to_json())
        with caplog.at_level(logging.DEBUG, "fxoffload"):
            assert fxoffload.profile("cpu").notes == "measurement 2"
        assert "is of Identity(device_name='NVIDIA H200'" in caplog.text

    def test_where_it_is(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        monkeypatch.setenv("FXOFFLOAD_CACHE_DIR", "~/mine")
        assert cache.folder() == tmp_path / "home" / "mine"
        monkeypatch.delenv("FXOFFLOAD_CACHE_DIR")
        assert cache.folder() == tmp_path / "xdg" / "fxoffload"
        for ignored in ("", "relative"):
            monkeypatch.setenv("XDG_CACHE_HOME", ignored)
            assert cache.folder() == tmp_path / "home" / ".cache" / "fxoffload"

    def test_a_folder_that_cannot_be_written(
        self,
        measured: Measurements,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        (tmp_path / "file").write_text("in the way")
        monkeypatch.setenv("FXOFFLOAD_CACHE_DIR", str(tmp_path / "file" / "cache"))
        found = fxoffload.profile("cpu")
        assert "cannot be kept on disk" in caplog.text
        # This process knows it all the same.
        assert profile_for("cpu", allow_measure=False) == found
        assert len(measured.devices) == 1

    def test_no_home(self, measured: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("FXOFFLOAD_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", no_home)
        assert fxoffload.profile("cpu") == fxoffload.profile("cpu")
        assert len(measured.devices) == 1

    def test_a_failed_write_leaves_what_was_there(
        self, measured: Measurements, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = fxoffload.profile("cpu")
        with monkeypatch.context() as full:
            full.setattr(cache.os, "replace", _no_space)
            assert fxoffload.profile("cpu", refresh=True).notes == "measurement 2"
        (file,) = kept_files(cache_folder)
        assert load_profile(file) == first
        assert not list(cache_folder.glob(".*"))

    def test_those_who_start_together_measure_once(self, measured: Measurements) -> None:
        measured.seconds = 0.2
        found: list[MachineProfile] = []
        ranks = [threading.Thread(target=lambda: found.append(fxoffload.profile("cpu"))) for _ in range(4)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert len(found) == 4
        assert len(set(found)) == len(measured.devices) == 1


class TestNamedProfile:
    def test_a_file_outweighs_all(
        self, measured: Measurements, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        fxoffload.profile("cpu")
        file = tmp_path / "mine.json"
        file.write_text(example().to_json())
        monkeypatch.setenv("FXOFFLOAD_PROFILE", str(file))
        for _ in range(2):
            assert fxoffload.profile("cpu") == example()
            assert profile_for("cpu", allow_measure=True) == example()
        assert len(measured.devices) == 1
        # Said once: by mistake it would make every prediction wrong.
        assert caplog.text.count("FXOFFLOAD_PROFILE names a profile of Example GPU; this device is") == 1

    def test_a_shipped_name_for_a_gpu_that_is_not_here(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("FXOFFLOAD_PROFILE", "h200")
        assert profile_for("cuda", allow_measure=False) == load_profile("h200")
        assert not caplog.records

    def test_refresh_has_no_effect_and_says_so(self, measured: Measurements, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FXOFFLOAD_PROFILE", "h200")
        with pytest.warns(UserWarning, match="refresh has no effect: FXOFFLOAD_PROFILE is set"):
            fxoffload.profile("cpu", refresh=True)
        assert not measured.devices

    @pytest.mark.parametrize(
        ("value", "hint"), [("h20", "did you mean 'h200'?"), ("/no/such/file.json", "shipped are")]
    )
    def test_neither_file_nor_name(self, monkeypatch: pytest.MonkeyPatch, value: str, hint: str) -> None:
        monkeypatch.setenv("FXOFFLOAD_PROFILE", value)
        with pytest.raises(OptionsError, match="FXOFFLOAD_PROFILE: expected a machine profile's file") as caught:
            profile_for("cpu", allow_measure=True)
        assert hint in str(caught.value)
        assert "h200" in str(caught.value)

    def test_a_file_that_is_no_profile(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        file = tmp_path / "mine.json"
        found = {**json.loads(example().to_json()), "memory_gb_per_s": -1}
        file.write_text(json.dumps(found))
        monkeypatch.setenv("FXOFFLOAD_PROFILE", str(file))
        with pytest.raises(OptionsError, match=r"FXOFFLOAD_PROFILE: .*mine\.json: expected memory_gb_per_s"):
            fxoffload.profile("cpu")

    def test_a_shipped_name_is_no_file(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.chdir(tmp_path)
        Path("h200").write_text(example().to_json())
        assert load_profile("h200").device_name == "NVIDIA H200"
        assert load_profile("./h200") == load_profile(Path("h200")) == example()


class TestProfileFor:
    def test_nothing_is_measured_unless_allowed(self, measured: Measurements) -> None:
        with pytest.raises(ProfileError) as caught:
            profile_for("cpu", allow_measure=False)
        assert isinstance(caught.value, RuntimeError)
        assert "call fxoffload.profile('cpu') before the first step" in str(caught.value)
        assert "FXOFFLOAD_PROFILE" in str(caught.value)
        assert not measured.devices
        assert profile_for("cpu", allow_measure=True) == profile_for("cpu", allow_measure=False)
        assert len(measured.devices) == 1

    def test_a_shipped_profile_by_device_name(self, measured: Measurements, h200: torch.device) -> None:
        # Another driver and another torch than the shipped file's.
        assert profile_for(h200, allow_measure=False) == load_profile("h200")
        assert not measured.devices

    def test_only_the_whole_name_counts(self, h200: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lookup, "identify", lambda _: Identity("NVIDIA H200 NVL", "cuda", "1", "2"))
        with pytest.raises(ProfileError, match="expected a profile of NVIDIA H200 NVL"):
            profile_for(h200, allow_measure=False)

    def test_measured_outweighs_shipped(self, h200: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
        here = example_of(lookup.identify(h200))
        monkeypatch.setattr(lookup, "measure", lambda device: here)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert profile_for(h200, allow_measure=True) == here
        assert profile_for(h200, allow_measure=False) == here

    def test_a_gpu_that_is_not_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        for device in ("cuda", "cuda:3"):
            with pytest.raises(ProfileError, match=f"expected {device} on this machine, found 0 CUDA devices"):
                fxoffload.profile(device)
        assert devices.resolve(None) == CPU

    def test_other_devices(self) -> None:
        with pytest.raises(UnsupportedError, match="expected a device out of cuda, cpu, found meta"):
            profile_for("meta", allow_measure=True)


class TestNeverInAStep:
    def test_not_in_a_backward(self, measured: Measurements) -> None:
        x = torch.ones(2, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: fxoffload.profile("cpu") and None)
        with pytest.raises(ProfileError, match="expected to measure between steps, found a backward that is running"):
            y.sum().backward()
        assert not measured.devices

    def test_not_between_a_forward_and_its_backward(self, measured: Measurements) -> None:
        model = compiled(Stack())
        loss: Tensor = model(batch()).sum()
        with pytest.raises(ProfileError, match="found a forward whose backward has not run"):
            fxoffload.profile("cpu")
        assert not measured.devices
        loss.backward()
        assert fxoffload.profile("cpu").notes == "measurement 1"

    def test_not_in_a_graph_capture(
        self, measured: Measurements, h200: torch.device, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(ProfileError, match="a CUDA graph capture"):
            fxoffload.profile(h200)
        assert not measured.devices

    def test_what_is_known_may_be_asked_for_at_any_time(self, measured: Measurements) -> None:
        known = fxoffload.profile("cpu")
        seen: list[MachineProfile] = []
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda grad: seen.append(fxoffload.profile("cpu")))
        x.sum().backward()
        assert seen == [known]


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")
