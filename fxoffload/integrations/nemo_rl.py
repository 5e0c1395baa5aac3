"""NeMo-RL's policy worker on ``fxoffload.phases``.

    @ray.remote
    class Worker(PhaseWorkerMixin, DTensorPolicyWorkerImpl):
        pass

The methods are those that the trainer calls on its workers; none of them replaces ``self.model`` or a tensor object. A
worker with ``cpu_offload`` keeps its own methods: its parameters live on the CPU, and FSDP moves them.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

from torch import nn

from fxoffload.environment import phases_device_types
from fxoffload.phases import PhaseManager
from fxoffload.phases.phase import BUFFERS, GRADS, OPTIMIZER, PARAMS


class PhaseWorkerMixin:
    """For a class with ``self.model`` and ``self.optimizer`` (which may be None). Comes first among the bases.

    Attributes:
        offload_optimizer_for_logprob: whether ``prepare_for_lp_inference`` sends the optimizer state away.
        offload_optimizer_for_refit: whether ``offload_before_refit`` does.

    Each is read from the worker itself, else from ``self.cfg``, else False and True.
    """

    model: nn.Module
    optimizer: Any

    _fxoffload_phases: PhaseManager | None = None

    @property
    def phases(self) -> PhaseManager:
        """The worker's manager; a new one when model or optimizer are other objects than before."""
        manager = self._fxoffload_phases
        optimizer = getattr(self, "optimizer", None)
        if manager is None or self._fxoffload_of != (id(self.model), id(optimizer)):
            if manager is not None:
                manager.close()
            manager = PhaseManager(self.model, optimizer, device_types=phases_device_types())
            self._fxoffload_phases = manager
            self._fxoffload_of = (id(self.model), id(optimizer))
        return manager

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Parameters and buffers come back, in the order of the layers, while the first ones already run; eval mode.

        Args:
            keep_train_buffers: a training step is open: gradients and optimizer state stay where they are.
        """
        # A worker's own has the argument in newer versions only.
        asked = {"keep_train_buffers": True} if keep_train_buffers else {}
        if self._left_to_worker("prepare_for_lp_inference", **asked):
            return
        if not keep_train_buffers:
            gone = (GRADS, OPTIMIZER) if self._option("offload_optimizer_for_logprob", False) else (GRADS,)
            self.phases.offload(*gone, wait=False)
        self.phases.onload(BUFFERS, PARAMS, wait=False)
        self.model.eval()

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Everything comes back; the optimizer state during the first forward and backward. Train mode."""
        if self._left_to_worker("prepare_for_training", *args, **kwargs):
            return
        self.phases.onload(wait=False)
        self.model.train()

    def finish_inference(self) -> None:
        """The parameters leave; eval mode."""
        if self._left_to_worker("finish_inference"):
            return
        self.phases.offload(PARAMS, BUFFERS)
        self.model.eval()

    def offload_before_refit(self) -> None:
        """Gradients and optimizer state leave, so that the inference engine has room for the weights."""
        if self._left_to_worker("offload_before_refit"):
            return
        gc.collect()  # graphs that hold activations in cycles
        gone = (GRADS, OPTIMIZER) if self._option("offload_optimizer_for_refit", True) else (GRADS,)
        self.phases.offload(*gone)

    def offload_after_refit(self) -> None:
        """Everything leaves; eval mode. With ``offload_optimizer_for_refit=False`` the optimizer state stays."""
        if self._left_to_worker("offload_after_refit"):
            return
        self.offload_before_refit()
        self.phases.offload(PARAMS, BUFFERS)
        self.model.eval()

    def _option(self, name: str, default: bool) -> bool:
        if name in vars(self) or hasattr(type(self), name):
            return bool(getattr(self, name))
        config = getattr(self, "cfg", None)
        if isinstance(config, Mapping) and name in config:
            return bool(config[name])
        return bool(getattr(config, name, default))

    def _left_to_worker(self, method: str, *args: Any, **kwargs: Any) -> bool:
        """Whether the worker keeps its parameters on the CPU; then its own method has been called."""
        if not getattr(self, "cpu_offload", False):
            return False
        own = getattr(super(), method, None)
        if own is None:
            raise RuntimeError(
                f"expected {type(self).__name__} to have a {method} of its own for cpu_offload=True, found none: FSDP "
                "keeps its parameters on the CPU and there is nothing to offload. Leave out PhaseWorkerMixin or "
                "cpu_offload"
            )
        own(*args, **kwargs)
        return True
