"""Private APIs of Hugging Face transformers: what ``save_pretrained`` does to a state dict before it writes it, how it
tells packed sequences, and hooks of its checkpointing.

Nothing here imports transformers: a model of it is only there if other code has.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

log = logging.getLogger(__name__)

_said: set[str] = set()
# Their names in transformers and in PEFT.
_INPUT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")


def is_pretrained_model(module: nn.Module) -> bool:
    """Whether a module is a ``transformers.PreTrainedModel``."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return kind is not None and isinstance(module, kind)


def is_adapter_layer(module: nn.Module) -> bool:
    """Whether PEFT has put an adapter around a layer: its weights have other names then, and no checkpoint has them."""
    kind = getattr(sys.modules.get("peft.tuners.tuners_utils"), "BaseTunerLayer", None)
    return kind is not None and isinstance(module, kind)


def drop_input_hooks(model: nn.Module) -> int:
    """Remove the hooks by which Hugging Face's checkpointing has embeddings return values that require gradients.

    A reentrant checkpoint needs that; another, which is the default, does not. Where embeddings are frozen (LoRA), such
    a hook breaks a compiled graph before the layers and after them.

    Returns:
        How many there were; 0 where a checkpoint may be reentrant, or none is on.
    """
    checkpoints = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    functions = [getattr(m, "_gradient_checkpointing_func", None) for m in checkpoints]
    if not functions or any(getattr(f, "keywords", {}).get("use_reentrant") is not False for f in functions):
        return 0
    # Enabled twice, as by PEFT and by the Trainer, transformers forgets the first: none of its functions removes that.
    found = [
        (module._forward_hooks, key)
        for module in model.modules()
        for key, hook in module._forward_hooks.items()
        if getattr(hook, "__name__", "") in _INPUT_HOOKS
    ]
    for hooks, key in found:
        del hooks[key]
    return len(found)


def is_saved_in_another_way(model: Any) -> bool:
    """Whether ``save_pretrained`` writes adapters alone, or asks a quantizer: others than this model's."""
    return getattr(model, "_hf_peft_config_loaded", False) or getattr(model, "hf_quantizer", None) is not None


def callback_handler_of_event() -> Any:
    """The ``CallbackHandler`` whose event is under way, in a callback that it has called; None where there is none.
    Events are given no Trainer: it is found among the callers."""
    kind = getattr(sys.modules.get("transformers.trainer_callback"), "CallbackHandler", None)
    frame = sys._getframe(1)
    while kind is not None and frame is not None:
        if isinstance(found := frame.f_locals.get("self"), kind):
            return found
        frame = frame.f_back
    return None


def knows_what_is_saved() -> bool:
    """Whether this version of transformers can be asked; if not, says so once."""
    if _missing := [name for name, found in _apis().items() if found is None]:
        import transformers

        if transformers.__version__ not in _said:
            _said.add(transformers.__version__)
            log.warning(
                "expected transformers to have %s, found none in version %s: stream_weights() and weights_on_device() "
                "hand out names and shapes as they are in memory, which for mixture-of-experts and vision models are "
                "not those of a checkpoint. Use a transformers that has them (5.0 to 5.24 do), or rename yourself",
                " and ".join(_missing),
                transformers.__version__,
            )
        return False
    return True


def as_saved(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What ``save_pretrained`` would write for a state dict of a model: names, shapes and values.

    Some weights are left out, of tied ones all but one; then names and layouts become those of the checkpoint.

    Args:
        model: is asked for its classes, its config and the shapes of its parameters.
        tensors: its state dict: meta tensors are the model's own parameters. Is emptied.

    Raises:
        Exception: whatever a conversion of transformers raises.
    """
    apis = _apis()
    for name in model._keys_to_ignore_on_save or ():
        tensors.pop(name, None)
    try:
        kept = apis["modeling_utils.remove_tied_weights_from_state_dict"](dict(tensors), model)
    except RuntimeError:
        kept = tensors  # tied weights that the model does not declare: save_pretrained refuses, and we send each name
    return apis["core_model_loading.revert_weight_conversion"](model, kept)


def conversions_of(model: Any) -> Any:
    """The conversions that a model was loaded with: with its class, they give its names and layouts in memory."""
    return getattr(model, "_weight_conversions", None)


def forget_consecutive_positions(implementation: str, are_consecutive: Callable[[Tensor], bool]) -> None:
    """Let transformers ignore ``position_ids`` in masks where they count up: then no sequences are packed.

    transformers reads their values for that, and where it cannot, under ``torch.compile``, it takes all for packed,
    those too that the model itself made because the caller gave none. For good; a second call has no effect.

    Args:
        implementation: the ``attn_implementation`` that this holds for; others are as before.
        are_consecutive: whether each row counts up by one for certain.
    """
    masking = sys.modules["transformers.masking_utils"]
    preprocess = getattr(masking, "_preprocess_mask_arguments", None)
    parameters = list(inspect.signature(preprocess).parameters) if preprocess is not None else []
    if preprocess is None or not {"config", "position_ids"} <= set(parameters):
        import transformers

        log.warning(
            "expected transformers.masking_utils to have _preprocess_mask_arguments(config, ..., position_ids), found "
            'another one in version %s: under torch.compile attn_implementation="%s" builds a mask wherever a model '
            "makes its own position_ids (with use_cache=False). Use a transformers that has it (5.0 to 5.24 do)",
            transformers.__version__,
            implementation,
        )
        return
    if hasattr(preprocess, "_fxoffload"):
        return
    place = parameters.index("position_ids")

    @functools.wraps(preprocess)
    def preprocess_mask_arguments(config: Any, *args: Any, **kwargs: Any) -> Any:
        if config._attn_implementation == implementation:
            position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[place - 1]
            if position_ids is not None and are_consecutive(position_ids):
                if "position_ids" in kwargs:
                    kwargs = {**kwargs, "position_ids": None}
                else:
                    args = (*args[: place - 1], None, *args[place:])
        return preprocess(config, *args, **kwargs)

    preprocess_mask_arguments._fxoffload = True  # type: ignore[attr-defined]
    masking._preprocess_mask_arguments = preprocess_mask_arguments  # type: ignore[attr-defined]


def _apis() -> dict[str, Any]:
    found = {}
    for path in ("modeling_utils.remove_tied_weights_from_state_dict", "core_model_loading.revert_weight_conversion"):
        module, _, name = path.partition(".")
        found[path] = getattr(sys.modules.get(f"transformers.{module}"), name, None)
    return found
