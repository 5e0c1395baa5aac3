"""Errors for a SRC that is no checkpoint folder: they say which to give."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fxoffload.checkpoints.errors import BrokenCheckpointError, CheckpointError, UnsupportedCheckpointError, some

# Owner and name; in an address, more may follow.
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_ADDRESS = re.compile(r"(?:(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)([^/]+/[^/]+)(?:/.*)?")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# What a trainer writes under such names that is no weights.
NO_WEIGHTS = re.compile(
    r"(training_args|(optimizer|scheduler|scaler|sampler)(_\d+)?|rng_state.*|random_states?.*)\.\w+"
)
_GGUF = "weights in the order of llama.cpp's kernels, mostly packed below 8 bits"


def no_folder(text: str) -> CheckpointError:
    """The error for a SRC that is no folder."""
    if os.path.lexists(text):
        return _a_file(Path(text))
    address = _HUB_ADDRESS.fullmatch(text)
    name = address[1] if address else text.rstrip("/")
    if _HUB_ID.fullmatch(name) and not Path(text).parent.is_dir():
        return CheckpointError(
            f"expected a checkpoint folder, found nothing at {text}; if that is a model of the Hugging Face Hub, fetch "
            f"it first and give that folder: hf download {name} --local-dir {name.split('/')[1]} (or, before hf, "
            "huggingface-cli download)"
        )
    return CheckpointError(
        f"expected a checkpoint folder, found nothing at {text}; look for a mistake in the name, or fetch the "
        f"checkpoint there first (hf download OWNER/NAME --local-dir {text})"
    )


def no_weights(folder: Path) -> CheckpointError:
    """The error for a folder with neither an index nor a single file of safetensors."""
    names = sorted(path.name for path in folder.iterdir())
    gguf = [name for name in names if name.lower().endswith(".gguf")]
    pickled = [name for name in names if name.lower().endswith(PICKLES) and not NO_WEIGHTS.fullmatch(name)]
    below = [name for name in names if _is_checkpoint(folder / name)] or _snapshots(folder)
    loose = [name for name in names if name.endswith(".safetensors")]
    expected = f"{folder}: expected model.safetensors.index.json or model.safetensors, found"
    if below:
        return BrokenCheckpointError(f"{expected} neither, but checkpoints in {some(below)}; give one of these folders")
    if pickled:
        return UnsupportedCheckpointError(
            f"{folder}: expected safetensors, found pickled weights: {some(pickled)}. Loading a pickle runs code and "
            "needs it whole in RAM; write safetensors first, with from_pretrained(SRC) and save_pretrained(DST)"
        )
    if loose:
        return BrokenCheckpointError(
            f"{expected} {len(loose)} files without an index: {some(loose)}; give the folder that has one, or fetch it"
        )
    if gguf:
        return UnsupportedCheckpointError(
            f"{folder}: expected safetensors, found GGUF: {some(gguf)}, {_GGUF}; fetch the checkpoint that they were "
            "made from"
        )
    found = f"only {some(names)}" if names else "an empty folder"
    return BrokenCheckpointError(
        f"{expected} neither, but {found}; give the folder that has one, or fetch it "
        f"(hf download OWNER/NAME --local-dir {folder})"
    )


def _a_file(path: Path) -> CheckpointError:
    name, folder = path.name.lower(), path.parent
    expected = "expected a checkpoint folder, found"
    if not path.exists():
        return CheckpointError(f"{expected} a link that leads nowhere at {path}; fetch the checkpoint again")
    if name.endswith(".gguf"):
        return UnsupportedCheckpointError(
            f"{expected} a GGUF file at {path}, {_GGUF}; fetch the safetensors that it was made from, and give their "
            "folder"
        )
    if name.endswith(PICKLES) and not NO_WEIGHTS.fullmatch(name):
        return UnsupportedCheckpointError(
            f"{expected} a file of pickled weights at {path}; write safetensors first, with from_pretrained(SRC) and "
            "save_pretrained(DST), and give that folder"
        )
    if name.endswith((".safetensors", ".json")):
        return CheckpointError(f"{expected} a file of one at {path}; give its folder: {folder}")
    return CheckpointError(f"{expected} a file at {path}; give the folder of a checkpoint")


def _is_checkpoint(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("model.safetensors.index.json", "model.safetensors"))


def _snapshots(folder: Path) -> list[str]:
    """What the Hub's cache keeps of a model, by revision."""
    return sorted(f"snapshots/{path.name}" for path in (folder / "snapshots").glob("*") if _is_checkpoint(path))
