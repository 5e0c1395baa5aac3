"""fxoffload with Hugging Face transformers: a callback for the Trainer, and attention without S x S masks.

Importing this module registers ``attn_implementation="fxoffload_causal_sdpa"``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fxoffload.errors import OptionsError, UnsupportedError
from fxoffload.options import Options
from fxoffload.torch_private.compiled_code import is_optimized_module
from fxoffload.torch_private.transformers import drop_input_hooks as drop_input_hooks

try:
    from transformers import TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(
        "fxoffload.integrations.transformers needs transformers; install it with pip install 'fxoffload[transformers]'"
    ) from error

from fxoffload.integrations.causal_attention import CAUSAL_ATTENTION as CAUSAL_ATTENTION
from fxoffload.integrations.full_masks import MaskDroppingCollator as MaskDroppingCollator
from fxoffload.integrations.full_masks import drop_full_mask as drop_full_mask
from fxoffload.integrations.logged_metrics import AddsToLogs, PerStep, gib, put_first, step_of
from fxoffload.report import metrics

log = logging.getLogger(__name__)

_GAUGES = {
    "fxoffload/host_bytes_reserved": "fxoffload/host_gib",
    "fxoffload/measured_peak_bytes": "fxoffload/step_peak_gib",
    "fxoffload/device_peak_bytes": "fxoffload/device_peak_gib",
}


def _counters(now: Mapping[str, float]) -> dict[str, float]:
    return {
        "fxoffload/offloaded_gib": gib(now["fxoffload/bytes_offloaded"]),
        "fxoffload/reloaded_gib": gib(now["fxoffload/bytes_reloaded"]),
        "fxoffload/exposed_ms": now["fxoffload/exposed_copy_ms"],
    }


# The cache key of the options each model was compiled with; weak, so that no model is kept alive.
_compiled: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()


class OffloadCallback(AddsToLogs):
    """Compiles the Trainer's model in place with fxoffload when training begins.

    Needed because ``TrainingArguments(torch_compile_backend=...)`` goes to accelerate, whose
    backend names are a fixed enum without third-party backends.

        Trainer(model, args, train_dataset=data, callbacks=[OffloadCallback(activation_budget="12GiB")])

    Takes the keyword options of ``fxoffload.Options``. Raises OptionsError (a ValueError) at once
    for options that are not accepted. A second ``train()`` on the same model compiles nothing;
    other options compile it again.

    With gradient checkpointing that is not reentrant (the default), it removes the hooks that make embeddings' outputs
    require gradients (``drop_input_hooks``). With LoRA they would break the graph. No gradient changes.

    It adds to the logs of training steps, and so to W&B, TensorBoard and the like. Averages for one step since the last
    log: ``fxoffload/offloaded_gib``, ``fxoffload/reloaded_gib``, ``fxoffload/exposed_ms``. As they are then:
    ``fxoffload/host_gib`` (pinned), ``fxoffload/step_peak_gib`` (of a plan whose steps were measured) and, on a GPU,
    ``fxoffload/device_peak_gib`` (torch's own peak).
    """

    added = frozenset(_GAUGES.values())

    def __init__(self, **options: Any) -> None:
        self.options = Options.from_torch_compile(None, options)
        self._per_step = PerStep()
        self._end_logging: Callable[[], None] = lambda: None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Compiles ``model``.

        Raises OptionsError when the model is already compiled by someone else, UnsupportedError (a
        NotImplementedError) where the Trainer would run several GPUs from one process.
        """
        if model is None:
            raise RuntimeError(
                "on_train_begin was called without a model; register OffloadCallback with a "
                "transformers.Trainer rather than calling it"
            )
        self._end_logging()
        self._compile(args, model)
        self._per_step.begin(step_of(state), _counters(metrics()))
        self._end_logging = put_first(self)

    def _compile(self, args: TrainingArguments, model: torch.nn.Module) -> None:
        if drop_input_hooks(model):
            log.info(
                "removed the hook by which gradient checkpointing makes embeddings' outputs require gradients: "
                "checkpoints that are not reentrant do without, and it breaks compiled graphs of frozen embeddings"
            )
        key = self.options.cache_key()
        if _compiled.get(model) == key:
            return
        self._check_not_compiled(args, model)
        if args.n_gpu > 1:
            # Its replicas copy the compiled call, which is bound to the model on the first GPU.
            raise UnsupportedError(
                f"the Trainer would spread the model over {args.n_gpu} GPUs with DataParallel, "
                "which cannot replicate a model compiled in place; start one process per GPU with "
                "torchrun or accelerate launch, or show it one GPU with CUDA_VISIBLE_DEVICES=0"
            )
        model.compile(backend="fxoffload", options=self.options)
        _compiled[model] = key

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leaves the Trainer's callbacks as they were."""
        self._end_logging()
        self._end_logging = lambda: None

    def _numbers(self, state: TrainerState) -> dict[str, float]:
        now = metrics()
        found = self._per_step.read(state.global_step, _counters(now))
        return found | {logged: gib(now[name]) for name, logged in _GAUGES.items() if name in now}

    def _check_not_compiled(self, args: TrainingArguments, model: torch.nn.Module) -> None:
        if args.torch_compile:
            raise OptionsError(
                "TrainingArguments has torch_compile=True, which compiles the model with another "
                "backend; set it (and torch_compile_backend, torch_compile_mode) back to the "
                "default, OffloadCallback compiles the model"
            )
        if is_optimized_module(model):
            raise OptionsError(
                "the model is already compiled with torch.compile(); give the Trainer the model itself, "
                "OffloadCallback compiles it"
            )
        if getattr(model, "_compiled_call_impl", None) is not None and model not in _compiled:
            raise OptionsError(
                "the model is already compiled with model.compile(); leave that call out, "
                "OffloadCallback compiles the model"
            )
