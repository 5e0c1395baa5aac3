"""The peers' strategies, written from their descriptions (shared/anchors.md, B), in our own lines."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from benchmarks.rl.host_pages import Registrar
from benchmarks.rl.job import RlJob
from benchmarks.rl.machine_memory import torch_pinned_bytes
from benchmarks.rl.strategy import PARAMS, Strategy


class PerTensor(Strategy):
    """``to("cpu")`` for every tensor, a fresh one each cycle; parameters through the module, as both frameworks do.

    ``pinned`` (verl's main): ``non_blocking=True`` makes torch allocate pinned memory, power-of-two sizes out of its
    caching allocator. Otherwise (NeMo-RL's DTensor worker) the copies are pageable.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._away: set[str] = set()

    def begin_offload(self, *groups: str) -> None:
        self._move(groups, down=True)

    def begin_onload(self, *groups: str) -> None:
        self._move(groups, down=False)

    def host_bytes(self) -> int | None:
        return torch_pinned_bytes() if self._pinned else None

    def _move(self, groups: tuple[str, ...], *, down: bool) -> None:
        wanted = {group for group in groups if (group in self._away) is not down}
        self._away = self._away | wanted if down else self._away - wanted
        if wanted & set(PARAMS):
            self.job.reshard()
            self.job.model._apply(lambda tensor: self._moved(tensor, down))
        if "optimizer" in wanted:
            for state in self.job.optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        state[name] = self._moved(value, down)

    def _moved(self, tensor: Tensor, down: bool) -> Tensor:
        if self.job.device.type == "cpu":
            return tensor.clone()  # the rehearsal: a copy is made, nothing is freed beyond the one it replaces
        return tensor.to("cpu" if down else self.job.device, non_blocking=self._pinned)


class ModuleTo(Strategy):
    """``Module.to`` for the parameters of a plain model, pageable, and the same for the optimizer's state."""

    def begin_offload(self, *groups: str) -> None:
        self._move(groups, torch.device("cpu"))

    def begin_onload(self, *groups: str) -> None:
        self._move(groups, self.job.device)

    def _move(self, groups: tuple[str, ...], target: torch.device) -> None:
        if "params" in groups:
            self.job.model.to(target)
        if "optimizer" in groups:
            for state in self.job.optimizer.state.values():
                state.update({k: v.to(target) for k, v in state.items() if isinstance(v, Tensor)})


class Packed(Strategy):
    """One buffer of the exact size, registered on one thread by the first offload; storages are freed and refilled."""

    def __init__(self) -> None:
        self._places: dict[str, list[tuple[torch.UntypedStorage, int, int]]] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._registrar: Registrar | None = None

    def attach(self, job: RlJob) -> None:
        super().attach(job)
        total = 0
        for group in ("params", "buffers", "optimizer"):
            places = self._places[group] = []
            for storage in job.storages(group):
                places.append((storage, total, storage.nbytes()))
                total += -(-storage.nbytes() // 512) * 512
        self._buffer = torch.empty(total, dtype=torch.uint8)

    def begin_offload(self, *groups: str) -> None:
        self.job.reshard()
        self._register()
        here = [place for group in groups for place in self._places[group] if place[0].nbytes()]
        for storage, offset, size in here:
            self._buffer[offset : offset + size].copy_(_as_bytes(storage), non_blocking=True)
        if self.job.device.type == "cuda":
            torch.cuda.current_stream(self.job.device).synchronize()
        for storage, _, _ in here:
            storage.resize_(0)

    def begin_onload(self, *groups: str) -> None:
        for group in groups:
            for storage, offset, size in self._places[group]:
                if not storage.nbytes():
                    storage.resize_(size)
                    _as_bytes(storage).copy_(self._buffer[offset : offset + size], non_blocking=True)

    def host_pieces(self) -> list[torch.Tensor]:
        return [self._buffer[at : at + size] for group in self._places.values() for _, at, size in group]

    def host_bytes(self) -> int | None:
        return self._buffer.numel()

    def close(self) -> None:
        if self._registrar is not None:
            self._registrar.unregister(self._buffer.data_ptr(), self._buffer.numel())
            self._registrar = None

    def _register(self) -> None:
        if self._registrar is not None:
            return
        self._registrar = Registrar(self.job.device)
        self._registrar.register(self._buffer.data_ptr(), self._buffer.numel())
        if self._registrar.num_failures:
            raise RuntimeError(f"expected cudaHostRegister to pin {self._buffer.numel()} bytes, found that it failed")


class MemorySaver(Strategy):
    """torch_memory_saver, where it is installed: pages of a region are unmapped under the tensors' addresses."""

    def __init__(self) -> None:
        try:
            from torch_memory_saver import torch_memory_saver  # type: ignore[import-not-found]
        except ImportError as error:
            raise RuntimeError("torch_memory_saver is not installed") from error
        torch_memory_saver.hook_mode = "torch"  # "preload" needs LD_PRELOAD before the process starts
        self._saver = torch_memory_saver
        self._paused: set[str] = set()

    def allocating(self, group: str) -> contextlib.AbstractContextManager[None]:
        return self._saver.region(tag=group, enable_cpu_backup=True)

    def begin_offload(self, *groups: str) -> None:
        self.job.reshard()
        for group in _regions(groups) - self._paused:
            self._saver.pause(group)
            self._paused.add(group)

    def begin_onload(self, *groups: str) -> None:
        for group in _regions(groups) & self._paused:
            self._saver.resume(group)
            self._paused.remove(group)


def _regions(groups: tuple[str, ...]) -> set[str]:
    """Buffers are made together with the parameters."""
    return {"params" if group == "buffers" else group for group in groups}


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
