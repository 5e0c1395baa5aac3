"""Which of the three layouts a checkpoint has, read from its keys and shapes and never guessed.

    experts   ...experts.{j}.gate_proj.weight [I, H], up_proj [I, H], down_proj [H, I]      one tensor per expert
    stacked   ...experts.gate_proj [E, I, H], up_proj [E, I, H], down_proj [E, H, I]
    fused     ...experts.gate_up_proj [E, 2I, H], down_proj [E, H, I], or a form of FORMS

E experts, I intermediate and H hidden features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fxoffload.checkpoints.errors import (
    BrokenCheckpointError,
    LayoutError,
    UnknownFamilyError,
    UnsupportedCheckpointError,
    some,
)
from fxoffload.checkpoints.expert_keys import FOUR_BIT, ExpertKey, KeyReader, Stored
from fxoffload.checkpoints.families import Family, Form, Tower
from fxoffload.checkpoints.find_family import EXAMPLE, find_family, quantization_of
from fxoffload.checkpoints.header import StoredTensor
from fxoffload.checkpoints.index import Checkpoint

Layout = Literal["experts", "stacked", "fused"]
LAYOUTS: tuple[Layout, ...] = ("experts", "stacked", "fused")

# How the tensors of one projection are found: by parameter, then by expert (None: one tensor for all).
Tensors = dict[tuple[Stored, str], dict[int | None, StoredTensor]]


@dataclass
class Block:
    """The experts of one layer. ``name`` is their module, ``tensors`` what the checkpoint holds of them.

    ``stem`` is how the name begins before the layer's number: the decoder's, for example ``model.layers.``.
    """

    name: str
    stem: str
    tower: Tower
    layer: int
    tensors: Tensors = field(default_factory=dict)

    def all_tensors(self) -> list[StoredTensor]:
        return [tensor for experts in self.tensors.values() for tensor in experts.values()]

    @property
    def num_experts(self) -> int:
        """Experts in this block; with one tensor each, as many as the highest number says."""
        counts = [
            tensor.shape[0] if expert is None and tensor.shape else (expert or 0) + 1
            for experts in self.tensors.values()
            for expert, tensor in experts.items()
        ]
        return max(counts)

    def single_module(self, family: Family) -> str:
        """The module that holds the experts in the layout of one tensor each: the files' name for it."""
        return f"{self.stem}{self.layer}.{family.module}"

    @property
    def weight_dtype(self) -> str:
        """Of the weights, or of what is there instead of them."""
        return next((t.dtype for (_, p), those in self.tensors.items() if p == "weight" for t in those.values()), "")


@dataclass(frozen=True)
class Experts:
    """A checkpoint and what its tensors are. ``form`` is set for the fused layout; ``others`` are not experts'."""

    checkpoint: Checkpoint
    family: Family
    section: str
    layout: Layout
    form: Form | None
    blocks: Mapping[str, Block]
    others: Mapping[str, StoredTensor]


def detect(checkpoint: Checkpoint, pattern: str | None = None) -> Experts:
    """Find the family and the layout of every expert.

    Raises LayoutError for a mixture, UnknownFamilyError where no key is an expert's, UnsupportedCheckpointError for
    4-bit weights. Completeness and shapes are check_experts' matter.
    """
    family, section = find_family(checkpoint.config, checkpoint.tensors, pattern)
    reader = KeyReader(family)
    found = {name: reader.read(name) for name in checkpoint.tensors}
    expert_keys = {name: key for name, key in found.items() if key is not None}
    _check_known(expert_keys, checkpoint)
    if not expert_keys:
        raise UnknownFamilyError(
            f"{checkpoint.folder}: expected experts named as {family.name} names them, as in "
            f"layers.N.{family.module}.0.{family.projections[0]}.weight, found none; keys: "
            f"{some([k for k in found if 'expert' in k] or list(found))}. Describe them with --pattern '{EXAMPLE}'"
        )
    layout = _layout(expert_keys)
    blocks: dict[str, Block] = {}
    for name, key in expert_keys.items():
        block = blocks.setdefault(key.block, Block(key.block, key.stem, key.tower, key.layer))
        if key.parameter is None:
            raise AssertionError(f"{name} was checked to be known")
        experts = block.tensors.setdefault((key.projection, key.parameter), {})
        if key.expert in experts:
            raise BrokenCheckpointError(f"{name} and {experts[key.expert].name} are the same expert's; remove one")
        experts[key.expert] = checkpoint.tensors[name]
    others = {name: tensor for name, tensor in checkpoint.tensors.items() if found[name] is None}
    _check_modules(family, blocks)
    form = _form(family, blocks) if layout == "fused" else None
    return Experts(checkpoint, family, section, layout, form, blocks, others)


def _check_known(keys: Mapping[str, ExpertKey], checkpoint: Checkpoint) -> None:
    unknown = [name for name, key in keys.items() if key.parameter is None]
    packed = [name for name in unknown if FOUR_BIT.search(name)]
    packed += [name for name in keys if checkpoint.tensors[name].dtype in ("F4", "F6_E2M3", "F6_E3M2")]
    if packed:
        method = quantization_of(checkpoint.config, {}).get("quant_method")
        raise UnsupportedCheckpointError(
            f"{checkpoint.folder}: the experts are packed below 8 bits (quant_method {method!r}): {some(packed)}. "
            "Their order is a kernel's; expected 8 bits or more: convert the checkpoint before quantization"
        )
    if unknown:
        raise LayoutError(
            "expected experts to hold weights, biases and scales only, and to be numbered 0, 1, 2 ..., found "
            f"{some(unknown)}; remove what is no expert's, or describe the experts with --pattern '{EXAMPLE}'"
        )


def _check_modules(family: Family, blocks: Mapping[str, Block]) -> None:
    """The experts of all layers are under one of the family's two modules."""
    by_module: dict[str, list[str]] = {}
    for name, block in blocks.items():
        by_module.setdefault(name.removeprefix(f"{block.stem}{block.layer}."), []).append(name)
    if len(by_module) > 1:
        listed = "; ".join(f"{module}: {some(names)}" for module, names in by_module.items())
        raise LayoutError(
            f"expected the experts of {family.name} under one module, found {listed}; rename one to the other"
        )


def _layout(keys: Mapping[str, ExpertKey]) -> Layout:
    by_layout: dict[str, list[str]] = {layout: [] for layout in LAYOUTS}
    merged_down = []
    for name, key in keys.items():
        if key.expert is not None:
            by_layout["experts"].append(name)
        elif key.projection == "down":
            merged_down.append(name)
        else:
            by_layout["fused" if key.projection == "gate_up" else "stacked"].append(name)
    present = [layout for layout in LAYOUTS if by_layout[layout]]
    if merged_down and present in ([], ["experts"]):
        present.append("stacked")
        by_layout["stacked"] = merged_down
    if len(present) > 1:
        listed = "; ".join(f"{layout}: {some(sorted(by_layout[layout]))}" for layout in present)
        raise LayoutError(f"expected one layout, found a mixture: {listed}. Convert a checkpoint that is of one layout")
    return present[0]  # type: ignore[return-value]


def _form(family: Family, blocks: Mapping[str, Block]) -> Form:
    """The form that fits the weights of every block: gate_up [E, a, b] with a = 2I or b = 2I, as down tells."""
    fitting = set(family.forms)
    for block in blocks.values():
        shapes = [block.tensors.get((projection, "weight"), {}).get(None) for projection in ("gate_up", "down")]
        if shapes[0] is None or shapes[1] is None:
            continue  # check_experts says which is missing
        gate_up, down = shapes[0].shape, shapes[1].shape
        fits = {form for form in family.forms if _fits(form, gate_up, down)}
        if not fits:
            raise BrokenCheckpointError(
                f"{block.name}: expected gate_up_proj and down_proj of one of the forms "
                f"{', '.join(family.forms)}, found {list(gate_up)} and {list(down)}; "
                "E experts come first, then [2I, H] and [H, I], or transposed [H, 2I] and [I, H]"
            )
        fitting &= fits
    if not fitting:
        raise LayoutError(f"expected one form of the fused layout, found several of {', '.join(family.forms)}")
    return next(form for form in family.forms if form in fitting)


def _fits(form: Form, gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    if len(gate_up) != 3 or len(down) != 3:
        return False
    if form == "concatenated":
        return gate_up[1] == 2 * down[2] and gate_up[2] == down[1]
    return gate_up[2] == 2 * down[1] and gate_up[1] == down[2]
