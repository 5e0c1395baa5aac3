from __future__ import annotations

import operator
from unittest import mock

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import Tensor, nn

from fxoffload.passes.find_candidates import FindCandidates, SavedValues
from tests.capture import WIDTH, Sketch, capture, example_input, tiny_tower

aten = torch.ops.aten
PARAMETER = "parameter, buffer, or computed from them alone"


def find(
    gm: fx.GraphModule, *, user: int = 1, static: tuple[int, ...] = (), min_bytes: int = 1, device: str = "cpu"
) -> SavedValues:
    passed = FindCandidates(
        num_user_outputs=user, static_inputs=static, min_bytes=min_bytes, device=torch.device(device)
    )
    return passed(gm)


def groups(saved: SavedValues) -> list[list[str]]:
    return [[n.name for n in c.nodes] for c in saved.candidates]


def reasons(saved: SavedValues) -> dict[str, str]:
    return {s.name: s.reason for s in saved.skipped}


def test_what_a_candidate_says() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, 8)
    sin = sketch.op(aten.sin.default, x)
    exp = sketch.op(aten.exp.default, sin)
    neg = sketch.op(aten.neg.default, sin)
    out = sketch.op(aten.add.Tensor, exp, neg)
    (found,) = find(sketch.module([out, sin])).candidates
    assert (found.name, found.nbytes, found.is_input) == ("sin", 4 * 8 * 4, False)
    assert found.producer == "aten.sin.default"


def test_parameters_are_known_by_their_index_and_not_by_their_shape() -> None:
    """Two inputs alike: 3-D, as expert weights are; only one of them is a parameter."""
    sketch = Sketch()
    weight, x = sketch.input("weight", 4, 8, 8), sketch.input("x", 4, 8, 8)
    out = sketch.op(aten.bmm.default, x, weight)
    gm = sketch.module([out, weight, x])
    saved = find(gm, static=(0,))
    assert groups(saved) == [["x"]]
    assert saved.candidates[0].is_input
    assert saved.candidates[0].producer == "placeholder"
    assert reasons(saved) == {"weight": PARAMETER}
    assert groups(find(gm, static=(1,))) == [["weight"]]
    assert groups(find(gm)) == [["weight"], ["x"]]


def test_what_is_computed_from_parameters_alone_stays() -> None:
    sketch = Sketch()
    weight, x = sketch.input("weight", 8, 8), sketch.input("x", 4, 8)
    cast = sketch.op(aten.to.dtype, weight, torch.bfloat16)
    folded = sketch.op(aten.mm.default, cast, sketch.op(aten.t.default, cast))
    mixed = sketch.op(aten.mm.default, x, weight)
    saved = find(sketch.module([sketch.op(aten.sum.default, mixed), cast, folded, mixed]), static=(0,))
    assert groups(saved) == [["mm_1"]]
    assert reasons(saved) == {"to": PARAMETER, "mm": PARAMETER}


def test_noise_in_the_shape_of_a_parameter_is_not_computed_from_it() -> None:
    """Recomputing it later would give other numbers; it has to be saved, and may be moved."""
    sketch = Sketch()
    weight = sketch.input("weight", 8, 8)
    noise = sketch.op(aten.rand_like.default, weight)
    saved = find(sketch.module([sketch.op(aten.mul.Tensor, weight, noise), noise]), static=(0,))
    assert groups(saved) == [["rand_like"]]


def test_what_the_caller_sees_stays_and_so_do_its_views() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, 8)
    out = sketch.op(aten.sin.default, x)
    view = sketch.op(aten.view.default, out, [32])
    other = sketch.op(aten.cos.default, x)
    saved = find(sketch.module([out, view, other]))
    assert groups(saved) == [["cos"]]
    assert reasons(saved) == {"view": "the caller sees it"}


def test_what_the_graph_writes_in_place_stays() -> None:
    sketch = Sketch()
    x, buffer = sketch.input("x", 4), sketch.input("buffer", 4)
    new = sketch.op(aten.add.Tensor, buffer, x)
    sketch.op(aten.copy_.default, buffer, new)
    saved = find(sketch.module([sketch.op(aten.mul.Tensor, x, x), buffer, new]))
    assert groups(saved) == [["add"]]
    assert reasons(saved) == {"buffer": "the graph writes it in place"}


def test_a_shared_storage_is_one_candidate_with_the_range_that_is_covered() -> None:
    """Fused QKV: two of three slices are saved, and the second one a second time as a view of itself."""
    sketch = Sketch()
    x = sketch.input("x", 6, 10)
    fused = sketch.op(aten.sin.default, x)
    query, key, value = (sketch.op(aten.slice.Tensor, fused, 0, 2 * i, 2 * i + 2) for i in range(3))
    flat = sketch.op(aten.view.default, value, [20])
    out = sketch.op(aten.add.Tensor, sketch.op(aten.add.Tensor, query, key), value)
    saved = find(sketch.module([out, key, value, flat, key]))
    assert groups(saved) == [["slice_2", "slice_3", "view"]]
    assert saved.candidates[0].nbytes == 2 * (2 * 10 * 4)  # not the first slice
    assert saved.candidate_bytes == saved.candidates[0].nbytes


def test_a_saved_graph_input_is_a_candidate_and_known_as_one_behind_a_view() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, 8)
    view = sketch.op(aten.view.default, x, [32])
    saved = find(sketch.module([sketch.op(aten.sin.default, view), view]))
    assert groups(saved) == [["view"]]
    assert saved.candidates[0].is_input


@pytest.mark.parametrize(("min_bytes", "expected"), [(0, 2), (1, 2), (16, 2), (17, 1), (64, 1), (65, 0)])
def test_min_bytes(min_bytes: int, expected: int) -> None:
    sketch = Sketch()
    small = sketch.op(aten.sin.default, sketch.input("x", 4))  # 16 bytes
    large = sketch.op(aten.sin.default, sketch.input("y", 16))  # 64 bytes
    saved = find(sketch.module([sketch.op(aten.sum.default, large), small, large]), min_bytes=min_bytes)
    assert len(saved.candidates) == expected
    assert set(reasons(saved).values()) <= {"smaller than min_bytes"}
    assert len(saved.candidates) + len(saved.skipped) == 2


def test_an_empty_tensor_is_never_worth_a_copy() -> None:
    sketch = Sketch()
    x = sketch.input("x", 0, 4)
    saved = find(sketch.module([sketch.op(aten.cos.default, x), sketch.op(aten.sin.default, x)]), min_bytes=0)
    assert reasons(saved) == {"sin": "smaller than min_bytes"}


def test_what_is_on_another_device_stays() -> None:
    """Checkpointing saves the state of the CPU's random generator."""
    sketch = Sketch()
    x, state = sketch.input("x", 4, device="meta"), sketch.input("state", 5056, dtype=torch.uint8)
    saved = find(sketch.module([sketch.op(aten.sin.default, x), x, state]), device="meta")
    assert groups(saved) == [["x"]]
    assert reasons(saved) == {"state": "on cpu, not on the device that is offloaded"}


def test_lazy_conjugates_stay() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4, dtype=torch.complex64)
    sin = sketch.op(aten.sin.default, x)
    saved = find(sketch.module([sketch.op(aten.abs.default, sin), sketch.op(aten._conj.default, sin)]))
    assert reasons(saved) == {"_conj": "a lazy conjugate or negation"}


def test_sizes_without_a_hint_are_candidates_of_unknown_size() -> None:
    """The run time decides by the real size."""
    sketch = Sketch()
    x = sketch.input("x", 4)
    sin = sketch.op(aten.sin.default, x)
    with mock.patch("fxoffload.passes.find_candidates.covered_range", lambda values: None):
        saved = find(sketch.module([sketch.op(aten.cos.default, sin), sin]), min_bytes=10**9)
    assert [(c.name, c.nbytes) for c in saved.candidates] == [("sin", None)]
    assert saved.candidate_bytes == 0


def test_saved_sizes_and_constants_are_no_candidates() -> None:
    sketch = Sketch()
    x = sketch.input("x", 4)
    size = sketch.graph.call_function(operator.mul, (2, 3))
    size.meta["val"] = 6
    saved = find(sketch.module([sketch.op(aten.sin.default, x), x, size, None]))
    assert groups(saved) == [["x"]]
    assert not saved.skipped


# -- real graphs -----------------------------------------------------------------------------------------------------


def test_the_weights_of_a_real_model_are_skipped_and_all_else_moves() -> None:
    saved = tiny_tower().forward.saved
    assert {s.reason for s in saved.skipped} == {PARAMETER}
    parameters = sum(p.numel() * p.element_size() for n, p in tiny_tower().model.named_parameters() if p.dim() > 1)
    assert sum(s.nbytes or 0 for s in saved.skipped) >= parameters - WIDTH * WIDTH * 4  # the first needs no grad_input
    assert [c.name for c in saved.candidates if c.is_input] == [saved.candidates[0].name]


class Experts(nn.Module):
    """3-D weights, as fused experts have them, and an activation of the very same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8, WIDTH))
        self.down = nn.Parameter(torch.randn(4, WIDTH, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(F.gelu(torch.bmm(x, self.up.transpose(1, 2))), self.down.transpose(1, 2))


def test_expert_weights_are_no_candidates() -> None:
    found = capture(Experts(), example_input().requires_grad_())  # (4, 8, 16), the shape of `up`
    candidates = found.forward.saved.candidates
    shapes = [tuple(sorted(c.nodes[0].meta["val"].shape)) for c in candidates]
    assert [c.is_input for c in candidates].count(True) == 1
    assert shapes.count((4, 8, WIDTH)) == 1  # the input
    assert len([s for s in found.forward.saved.skipped if s.reason == PARAMETER]) == 2


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.second(F.gelu(self.first(x)))


def test_weight_casts_of_autocast_are_no_candidates() -> None:
    found = capture(Autocast(), example_input(), loss=lambda out: out.float().square().sum())
    saved = found.forward.saved
    casts = [s for s in saved.skipped if s.reason == PARAMETER]
    assert casts, "no weight cast was saved, so this tests nothing"
    weights = 2 * sum(p.numel() for p in found.model.parameters() if p.dim() > 1)  # in bfloat16
    assert sum(s.nbytes or 0 for s in casts) <= weights
    for candidate in saved.candidates:
        assert candidate.nodes[0].meta["val"].size(0) in (4, 32)  # batch, or batch x sequence
