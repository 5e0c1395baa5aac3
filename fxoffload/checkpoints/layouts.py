"""Which of the three layouts each tower of a checkpoint has, read from its keys and shapes and never guessed.

    experts   ...experts.{j}.gate_proj.weight [I, H], up_proj [I, H], down_proj [H, I]      one tensor per expert
    stacked   ...experts.gate_proj [E, I, H], up_proj [E, I, H], down_proj [E, H, I]
    fused     ...experts.gate_up_proj [E, 2I, H], down_proj [E, H, I], or a form of FORMS

E experts, I intermediate and H hidden features.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fxoffload.checkpoints.config_values import whole_number
from fxoffload.checkpoints.errors import (
    BrokenCheckpointError,
    LayoutError,
    UnknownFamilyError,
    UnsupportedCheckpointError,
    shortened,
    some,
)
from fxoffload.checkpoints.expert_keys import FOUR_BIT, ExpertKey, KeyReader, Stored
from fxoffload.checkpoints.extras import find_extras
from fxoffload.checkpoints.families import PROJECTIONS, Family, Form, Projection, Tower
from fxoffload.checkpoints.find_family import EXAMPLE, find_family, quantization_of, tower_config
from fxoffload.checkpoints.header import StoredTensor
from fxoffload.checkpoints.index import Checkpoint

Layout = Literal["experts", "stacked", "fused"]
# Of a whole checkpoint whose towers have several.
Mixed = Literal["mixed"]
LAYOUTS: tuple[Layout, ...] = ("experts", "stacked", "fused")

# How the tensors of one projection are found: by parameter, then by expert (None: one tensor for all).
Tensors = dict[tuple[Stored, str], dict[int | None, StoredTensor]]


@dataclass
class LayoutBlock:
    """The experts of one layer. ``name`` is their module, ``tensors`` what the checkpoint holds of them.

    ``stem`` is how the name begins before the layer's number: the decoder's, for example ``model.layers.``. ``group``
    names the layers that have one ``layout`` and ``form`` (of the fused layout): the stem, or with the layer's number.
    """

    name: str
    stem: str
    group: str
    tower: Tower
    layer: int
    layout: Layout
    form: Form | None = None
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

    def single_name(self, family: Family, expert: int, projection: Projection, parameter: str) -> str:
        """The name of one expert's tensor in that layout."""
        name = family.projections[PROJECTIONS.index(projection)]
        return f"{self.single_module(family)}.{expert}.{name}.{parameter}"

    @property
    def weight_dtype(self) -> str:
        """Of the weights; "" where a quantized block has none."""
        return next((t.dtype for (_, p), those in self.tensors.items() if p == "weight" for t in those.values()), "")


@dataclass(frozen=True)
class Experts:
    """A checkpoint and the meaning of its tensors. ``others`` are not experts'.

    ``section`` is the dotted path of the config's part that counts the experts.
    """

    checkpoint: Checkpoint
    family: Family
    section: str
    blocks: Mapping[str, LayoutBlock]
    others: Mapping[str, StoredTensor]

    @property
    def layout(self) -> Layout | Mixed:
        """Of all blocks; "mixed" where towers differ."""
        return one_layout(block.layout for block in self.blocks.values())

    @property
    def form(self) -> Form | None:
        """Of the fused blocks, where all are fused and of one form."""
        forms: set[Form | None] = {block.form for block in self.blocks.values()}
        return forms.pop() if len(forms) == 1 else None

    def config_of(self, tower: Tower) -> Mapping[str, Any]:
        """The part of the config that describes ``tower``."""
        return tower_config(self.checkpoint.config, self.section, tower)


def one_layout(layouts: Iterable[Layout]) -> Layout | Mixed:
    """The layout that all of ``layouts`` are."""
    different = set(layouts)
    return different.pop() if len(different) == 1 else "mixed"


def detect(checkpoint: Checkpoint, pattern: str | None = None) -> Experts:
    """Find the family, and the layout of each tower's experts, in the index and outside it.

    Raises LayoutError for a mixture within a tower, UnknownFamilyError where no key is an expert's,
    UnsupportedCheckpointError for 4-bit weights. Completeness and shapes are check_experts' matter.
    """
    family, section = find_family(checkpoint.config, checkpoint.tensors, pattern)
    reader = KeyReader(family)
    checkpoint = find_extras(checkpoint, reader, family)
    found = {name: reader.read(name) for name in checkpoint.tensors}
    expert_keys = {name: key for name, key in found.items() if key is not None}
    _check_known(expert_keys, checkpoint)
    if not expert_keys:
        raise UnknownFamilyError(
            f"{checkpoint.folder}: expected experts named as {family.name} names them, as in "
            f"layers.N.{family.module}.0.{family.projections[0]}.weight, found none; keys: "
            f"{some([k for k in found if 'expert' in k] or list(found))}. Describe them with --pattern '{EXAMPLE}'"
        )
    blocks: dict[str, LayoutBlock] = {}
    for group, keys in _by_tower(expert_keys, checkpoint.config, section).items():
        blocks |= _read_tower(family, group, keys, checkpoint.tensors)
    others = {name: tensor for name, tensor in checkpoint.tensors.items() if found[name] is None}
    return Experts(checkpoint, family, section, blocks, others)


def _by_tower(
    keys: Mapping[str, ExpertKey], config: Mapping[str, Any] | None, section: str
) -> dict[str, dict[str, ExpertKey]]:
    """Keys that have one layout: of one module's layers. A layer after the decoder's last one is a tower by itself.

    DeepSeek and GLM store the layers of multi-token prediction there, and tools convert the others only.
    """
    towers: dict[str, dict[str, ExpertKey]] = {}
    for name, key in keys.items():
        num_layers = whole_number(tower_config(config, section, key.tower), "num_hidden_layers")
        is_after = num_layers is not None and not key.tower.optional and key.layer >= num_layers
        group = f"{key.stem}{key.layer}." if is_after else key.stem
        towers.setdefault(group, {})[name] = key
    return towers


def _read_tower(
    family: Family, group: str, keys: Mapping[str, ExpertKey], tensors: Mapping[str, StoredTensor]
) -> dict[str, LayoutBlock]:
    layout = _layout(group, keys)
    blocks: dict[str, LayoutBlock] = {}
    for name, key in keys.items():
        block = blocks.setdefault(key.block, LayoutBlock(key.block, key.stem, group, key.tower, key.layer, layout))
        if key.parameter is None:
            raise AssertionError(f"{name} was checked to be known")
        experts = block.tensors.setdefault((key.projection, key.parameter), {})
        if key.expert in experts:
            raise BrokenCheckpointError(f"{name} and {experts[key.expert].name} are the same expert's; remove one")
        experts[key.expert] = tensors[name]
    _check_modules(family, blocks)
    form = _form(family, blocks) if layout == "fused" else None
    return {name: replace(block, form=form) for name, block in blocks.items()}


def _check_known(keys: Mapping[str, ExpertKey], checkpoint: Checkpoint) -> None:
    unknown = [name for name, key in keys.items() if key.parameter is None]
    packed = [name for name in unknown if FOUR_BIT.search(name)]
    packed += [name for name in keys if checkpoint.tensors[name].dtype in ("F4", "F6_E2M3", "F6_E3M2")]
    if packed:
        method = shortened(quantization_of(checkpoint.config, {}).get("quant_method"))
        raise UnsupportedCheckpointError(
            f"{checkpoint.folder}: the experts are packed below 8 bits (quant_method {method}): {some(packed)}. "
            "Their order is a kernel's; expected 8 bits or more: convert the checkpoint before quantization"
        )
    if unknown:
        raise LayoutError(
            "expected experts to hold weights, biases and scales only, and to be numbered 0, 1, 2 ..., found "
            f"{some(unknown)}; remove what is no expert's, or describe the experts with --pattern '{EXAMPLE}'"
        )


def _check_modules(family: Family, blocks: Mapping[str, LayoutBlock]) -> None:
    """The experts of all layers of a tower are under one of the family's two modules."""
    by_module: dict[str, list[str]] = {}
    for name, block in blocks.items():
        by_module.setdefault(name.removeprefix(f"{block.stem}{block.layer}."), []).append(name)
    if len(by_module) > 1:
        listed = "; ".join(f"{module}: {some(names)}" for module, names in by_module.items())
        raise LayoutError(
            f"expected the experts of {family.name} under one module, found {listed}; rename one to the other"
        )


def _layout(group: str, keys: Mapping[str, ExpertKey]) -> Layout:
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
        raise LayoutError(
            f"expected one layout in all layers of {group}, found a mixture: {listed}. Convert a checkpoint "
            "whose towers are of one layout each; fetch it again if a conversion was cut short"
        )
    return present[0]  # type: ignore[return-value]


def _form(family: Family, blocks: Mapping[str, LayoutBlock]) -> Form:
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
                "E experts come first, then [2I, H] and [H, I], or transposed [H, 2I] and [I, H]: fetch the "
                "shards again"
            )
        fitting &= fits
    if not fitting:
        raise LayoutError(
            f"{next(iter(blocks.values())).stem}: expected one form of the fused layout, found several of "
            f"{', '.join(family.forms)}; fetch the shards again that are of another checkpoint"
        )
    return next(form for form in family.forms if form in fitting)


def _fits(form: Form, gate_up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    if len(gate_up) != 3 or len(down) != 3:
        return False
    if form == "concatenated":
        return gate_up[1] == 2 * down[2] and gate_up[2] == down[1]
    return gate_up[2] == 2 * down[1] and gate_up[1] == down[2]
