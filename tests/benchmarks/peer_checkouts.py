"""Checkouts of peers as small as they can be: the same file names and the same API, with code of our own."""

from pathlib import Path

TRL = """
import torch
from accelerate.logging import get_logger
from accelerate.utils.versions import is_torch_version

logger = get_logger(__name__)
assert is_torch_version(">=", "2.0")


class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
    def __init__(self, max_fwd_stash_size=5):
        self.max_fwd_stash_size = max_fwd_stash_size
        self.num_packed = 0
        super().__init__(self.pack, lambda kept: kept)

    def pack(self, tensor):
        self.num_packed += 1
        return tensor.clone()


def get_act_offloading_ctx_manager(model, warn_if_no_head=True, **options):
    manager = OffloadActivations(**options)
    manager.model = model
    logger.warning("made")
    return manager
"""

# The device module is imported from the checkout, the FSDP one is the harness's stand-in: the file's own would raise.
VERL = """
import torch
from verl.utils.device import FACTOR
from verl.utils.fsdp_utils import FSDPModule


class SynchronizedGroupOffloadHandler:
    @staticmethod
    def offload(tensor, pin_memory=True):
        assert not pin_memory, "nothing to pin on a CPU"
        return tensor.clone() * FACTOR


def enable_activation_offloading(model, strategy, enable_ckpt=False):
    assert strategy == "fsdp2"

    def pack(tensor):
        return SynchronizedGroupOffloadHandler.offload(tensor)

    for layer in [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]:
        def forward(*args, inner=layer.forward, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
                return inner(*args, **kwargs)
        layer.forward = forward
"""


# What verl.utils.model has is the harness's stand-in: the file's own would raise.
VERL_PHASES = """
from verl.utils.device import FACTOR
from verl.utils.model import check_exclude_modules, check_target_modules

CALLS = []


def offload_fsdp_model_to_cpu(model, empty_cache=True):
    CALLS.append(("offload model", model, empty_cache))


def load_fsdp_model_to_gpu(model):
    CALLS.append(("load model", model))


def offload_fsdp_optimizer(optimizer):
    CALLS.append(("offload optimizer", optimizer))


def load_fsdp_optimizer(optimizer, device_id):
    CALLS.append(("load optimizer", optimizer, device_id))
"""


def write_verl_phases(folder: Path) -> Path:
    """A checkout of verl whose functions for phases say that they were called."""
    return _write(
        folder,
        {
            "verl/__init__.py": "raise ImportError",
            "verl/utils/__init__.py": "raise ImportError",
            "verl/utils/model.py": "raise ImportError",
            "verl/utils/device.py": "FACTOR = 1",
            "verl/utils/fsdp_utils.py": VERL_PHASES,
        },
    )


def write_trl(folder: Path) -> Path:
    """A checkout of TRL whose manager counts packed tensors."""
    return _write(folder, {"trl/__init__.py": "raise ImportError", "trl/models/activation_offloading.py": TRL})


def write_verl(folder: Path, factor: float = 1.0) -> Path:
    """A checkout of verl that keeps copies times ``factor``: with another than 1 its gradients are wrong."""
    return _write(
        folder,
        {
            "verl/__init__.py": "raise ImportError",
            "verl/utils/__init__.py": "raise ImportError",
            "verl/utils/fsdp_utils.py": "raise ImportError",
            "verl/utils/device.py": f"FACTOR = {factor}",
            "verl/utils/activation_offload.py": VERL,
        },
    )


def _write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
