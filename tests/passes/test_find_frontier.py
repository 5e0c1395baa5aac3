from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from functorch.compile import min_cut_rematerialization_partition
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxoffload
from fxoffload.analysis import find_frontier
from fxoffload.analysis.find_frontier import FindFrontier, LayerClass, RecomputePoint
from fxoffload.analysis.labels import LAYER_KEY
from fxoffload.analysis.layer_classes import WHOLE_GRAPH, Joint, is_random, layout_bytes
from fxoffload.analysis.min_cut import SINK, SOURCE, Network
from fxoffload.analysis.values import output_values
from fxoffload.compiler import session
from fxoffload.passes.annotate_layers import AnnotateLayers
from fxoffload.passes.tag_recompute import TagRecompute
from fxoffload.torch_private.partitioner import is_rng_state
from tests import support
from tests.capture import WIDTH, Block, Captured, Sketch, Tower, capture, example_input
from tests.marks import examples, slow
from tests.support import assert_equal

aten = torch.ops.aten
Choice = Callable[[LayerClass, str], RecomputePoint]


@dataclass
class Rates:
    """A machine on which contractions of tiny values are dear."""

    launch_us: float = 0.0

    def op_ms(self, node: fx.Node) -> None:
        return None

    def matmul_ms(self, flops: float, dtype: torch.dtype) -> float:
        return flops / 1e6

    grouped_matmul_ms = matmul_ms

    def attention_ms(self, flops: float, dtype: torch.dtype, backward: bool) -> float:
        return flops / 0.5e6

    def memory_ms(self, nbytes: float) -> float:
        return nbytes / 100e6


@dataclass
class Step:
    """A step compiled under chosen points: predictions, graphs and results."""

    classes: tuple[LayerClass, ...]
    captured: Captured
    observed: dict[str, Tensor]
    labels: Mapping[str, str]  # op of the joint graph -> its layer
    static: frozenset[str]

    def saved(self) -> dict[str, tuple[str | None, int | None]]:
        """Every storage that the forward saves, parameters aside: name -> layer that makes it, bytes."""
        values = self.captured.forward.saved
        states = {n.name for n in self.captured.forward.gm.graph.nodes if is_rng_state(n)}  # of an attention
        sizes = {c.name: c.nbytes for c in (*values.candidates, *values.skipped) if c.name not in states}
        return {name: (self.labels.get(name), size) for name, size in sizes.items() if name not in self.static}


def step(model: nn.Module, x: Tensor, choose: Choice | None) -> Step:
    """One step with the chosen points of all layers (None: no tags at all)."""
    classes: list[LayerClass] = []
    labels: dict[str, str] = {}
    parameters: list[str] = []

    def partition(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        labels.update({n.name: n.meta.get(LAYER_KEY, WHOLE_GRAPH) for n in gm.graph.nodes if n.op == "call_function"})
        static = kwargs.get("static_lifetime_input_indices") or ()
        parameters.extend(gm.graph.find_nodes(op="placeholder")[i].name for i in static)
        find = FindFrontier(Rates(), num_forward_outputs=kwargs["num_fwd_outputs"], static_inputs=static)
        classes.extend(find(gm))
        if choose is not None:
            TagRecompute({label: choose(c, label) for c in classes for label in c.layers})(gm)
        return min_cut_rematerialization_partition(gm, inputs, **kwargs)

    model.zero_grad()
    torch.manual_seed(3)
    with mock.patch.object(session, "min_cut_rematerialization_partition", partition):
        captured = capture(model, x, recompute="default", policy="keep_all")
    observed = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Step(
        tuple(classes), captured, {"out": captured.output.detach().clone(), **observed}, labels, frozenset(parameters)
    )


class Dropping(nn.Module):
    """Attention, dropout, a fused projection, a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k.sin(), v, is_causal=True).transpose(1, 2).flatten(2)
        gated = F.dropout(F.relu(self.out(attended)), 0.3)
        return x + torch.tanh(gated.double()).float() * attended.sort(dim=-1).values


@functools.cache
def qwen3() -> tuple[nn.Module, Tensor]:
    pytest.importorskip("transformers")
    from benchmarks import workloads

    torch.manual_seed(0)
    config = workloads.Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        use_cache=False,
    )
    config._attn_implementation = workloads.CAUSAL_ATTENTION
    model = workloads.Stack(workloads.Qwen3Model(config))
    model.decoder.set_input_embeddings(nn.Identity())
    return model, torch.randn(2, 16, 32, requires_grad=True)


class LastHidden(nn.Module):
    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(inputs_embeds=x, use_cache=False).last_hidden_state


@functools.cache
def llama() -> tuple[nn.Module, Tensor]:
    """Hugging Face's own attention (a mask, repeated keys and values), with dropout."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.2,
        use_cache=False,
        attn_implementation="sdpa",
    )
    decoder = transformers.LlamaModel(config)
    decoder.set_input_embeddings(nn.Identity())
    return LastHidden(decoder), torch.randn(2, 16, 32, requires_grad=True)


@functools.cache
def tower() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Tower(3, make=Block), example_input()


@functools.cache
def dropping() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Tower(3, make=Dropping), example_input()


@functools.cache
def dropout_stack() -> tuple[nn.Module, Tensor]:
    return support.Stack(3, dropout=0.2), support.batch()


@functools.cache
def layer() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Dropping(), example_input().requires_grad_()


MODELS = {f.__name__: f for f in (tower, dropping, dropout_stack, qwen3, llama, layer)}


@functools.cache
def untouched(name: str) -> Step:
    return step(*MODELS[name](), None)


def at(index: int) -> Choice:
    """The same place of every frontier."""
    return lambda c, label: c.points[min(index, len(c.points) - 1)]


def saved_names(c: LayerClass, label: str, point: RecomputePoint) -> dict[str, int]:
    return {c.name_at(label, s.position): s.nbytes for s in point.saved}


def check(found: Step, choose: Choice) -> None:
    """The saved storages are those of the points, one by one, and nothing else of the layers is."""
    expected: dict[str, int] = {}
    for c in found.classes:
        for label in c.layers:
            expected |= saved_names(c, label, choose(c, label))
    saved = found.saved()
    layers = {label for c in found.classes for label in c.layers}
    # Between the layers the partitioner decides for itself: it may compute a rotary embedding again.
    elsewhere = {n for n in expected.keys() - saved.keys() if found.labels.get(n, "") not in layers}
    assert {n: size for n, (_, size) in saved.items() if n in expected} == {
        n: size for n, size in expected.items() if n not in elsewhere
    }
    assert all(n in found.labels for n in elsewhere), "graph inputs are saved"
    assert not {n for n, (label, _) in saved.items() if label in layers and n not in expected}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tower", "dropping", "dropout_stack", "layer"])
def test_every_point_is_what_is_saved_and_changes_no_bit(name: str) -> None:
    before = untouched(name)
    num_points = max(len(c.points) for c in before.classes)
    assert num_points >= 3
    for i in range(num_points):
        found = step(*MODELS[name](), at(i))
        check(found, at(i))
        assert_equal(found.observed, before.observed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", slow("llama")])
@pytest.mark.parametrize("place", [0.0, 0.4, 1.0])
def test_points_of_decoders_are_what_is_saved_and_change_no_bit(name: str, place: float) -> None:
    def choose(c: LayerClass, label: str) -> RecomputePoint:
        return c.points[round(place * (len(c.points) - 1))]

    found = step(*MODELS[name](), choose)
    check(found, choose)
    assert_equal(found.observed, untouched(name).observed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tower", "qwen3"])
def test_layers_may_have_different_points(name: str) -> None:
    def choose(c: LayerClass, label: str) -> RecomputePoint:
        return c.points[(int(label.split(".")[-1]) + 1) % len(c.points)]

    found = step(*MODELS[name](), choose)
    check(found, choose)
    assert_equal(found.observed, untouched(name).observed)
    assert len({choose(c, label).recomputed for c in found.classes for label in c.layers}) >= 2


@pytest.mark.slow
def test_dynamic_sizes() -> None:
    model, x = tower()[0], example_input()
    torch._dynamo.mark_dynamic(x, 0)
    found = step(model, x, at(3))
    sizes = [n.meta["val"] for n in found.captured.joint.graph.find_nodes(op="placeholder")]
    assert any(isinstance(s, torch.SymInt) for s in sizes)
    check(found, at(3))
    assert_equal(found.observed, untouched("tower").observed)


@pytest.mark.slow
def test_points_save_less_and_take_longer_from_all_to_the_input_alone() -> None:
    for c in untouched("qwen3").classes:
        times, sizes = [p.extra_ms for p in c.points], [p.nbytes for p in c.points]
        assert times == sorted(set(times))
        assert sizes == sorted(set(sizes), reverse=True)
        assert c.points[0].extra_ms == 0
        last = [s for s in c.points[-1].saved if s.position >= 0]
        # The last layer's result is the input of what follows the layers.
        assert len(last) == (c.layers[-1] == "decoder.layers.2")
        assert c.points[-1].extra_bytes > c.points[0].extra_bytes == 0


@pytest.mark.slow
def test_layers_of_one_structure_are_solved_once() -> None:
    torch.manual_seed(0)
    found = step(Tower(6), example_input(), None)
    assert [c.layers for c in found.classes] == [tuple(f"layers.{i}" for i in range(6))]
    (c,) = found.classes
    assert c.name_at("layers.0", 0) != c.name_at("layers.3", 0)
    names = [saved_names(c, label, c.points[0]) for label in c.layers]
    assert len({name for n in names for name in n}) == 6 * len(c.points[0].saved)


def test_layers_that_look_up_seeds_of_their_own_are_of_one_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    find, found = FindFrontier.__call__, []

    def spy(self: FindFrontier, gm: fx.GraphModule) -> tuple[LayerClass, ...]:
        assert sum("inductor_lookup_seed" in str(n.target) for n in gm.graph.nodes) == 3, "not what this is about"
        found.append(find(self, gm))
        return found[-1]

    monkeypatch.setattr(FindFrontier, "__call__", spy)
    fxoffload.plan(support.Stack(3, dropout=0.2), example_args=(support.batch(),), min_bytes=1)
    assert [len(c.layers) for c in found[0]] == [1, 2]  # nothing is saved before the first one


# -- a user's policy ---------------------------------------------------------------------------------------------------


def checkpointed(policy: Callable[..., CheckpointPolicy]) -> nn.Module:
    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)

    torch.manual_seed(0)
    return Tower(3, make=Checkpointed)


@pytest.mark.slow
def test_a_users_policy_is_obeyed() -> None:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    model, x = checkpointed(policy), example_input()
    before = step(model, x, None)
    for choose in (at(0), at(100)):
        found = step(model, x, choose)
        assert_equal(found.observed, before.observed)
        ops = {n.name: n for n in found.captured.joint.graph.nodes}
        for c in found.classes:
            for label in c.layers:
                for i, name in enumerate(c.names[label]):
                    if name in ops and ops[name].target is aten.addmm.default:
                        assert i not in choose(c, label).recomputed
                    if name in ops and ops[name].target is aten.erf.default:
                        assert ops[name].meta["recompute"] is CheckpointPolicy.PREFER_RECOMPUTE
                        assert i in choose(c, label).recomputed


def read(sketch: Sketch, tangent: fx.Node, *values: fx.Node) -> fx.Node:
    """A backward that reads ``values``."""
    for value in values:
        tangent = sketch.op(aten.mul.Tensor, tangent, value, backward=True)
    return tangent


OFFLOAD = getattr(CheckpointPolicy, "MUST_CPU_OFFLOAD", None)


@pytest.mark.parametrize("tag", [t for t in (*CheckpointPolicy, None)], ids=str)
def test_each_tag_of_a_user(tag: CheckpointPolicy | None) -> None:
    sketch = Sketch()
    x, tangent = sketch.input("x", 8, 8), sketch.input("tangents_1", 8, 8)
    first = sketch.op(aten.mm.default, x, x)
    second = sketch.op(aten.mm.default, first, x)
    if tag is not None:
        second.meta["recompute"] = tag
    gm = sketch.module([sketch.op(aten.sin.default, second), read(sketch, tangent, x, second)])
    (c,) = FindFrontier(Rates(), num_forward_outputs=1)(gm)
    again = [1 in p.recomputed for p in c.points]
    if tag is None:
        assert again == [False, True]
    else:
        assert again == ["RECOMPUTE" in tag.name] * len(again)
    assert c.must_offload == ((1,) if tag is not None and tag is OFFLOAD else c.must_offload)
    TagRecompute({WHOLE_GRAPH: c.points[-1]})(gm)
    if tag is not None:
        assert ("RECOMPUTE" in tag.name) == ("RECOMPUTE" in second.meta["recompute"].name)
        assert "ac_graph_id" not in second.meta


def test_recomputing_a_product_takes_the_products_time() -> None:
    sketch = Sketch()
    x, w, tangent = (sketch.input(name, 8, 8) for name in ("x", "w", "tangents_1"))
    product = sketch.op(aten.mm.default, x, w)
    grad = sketch.op(aten.mul.Tensor, product, tangent, backward=True)
    joint = Joint(sketch.module([sketch.op(aten.neg.default, product), grad]), 1, set())
    problem = find_frontier._Problem(joint, joint.layers[WHOLE_GRAPH], Rates(launch_us=1.0), set())
    assert problem._op_ms(product) == pytest.approx(2 * 8**3 / 1e6 + 1e-3)


# -- against brute force -----------------------------------------------------------------------------------------------


@st.composite
def random_layers(draw: st.DrawFn) -> fx.GraphModule:
    """Products, pointwise ops, sums, views and random numbers, wired at random; a backward that reads some of them."""
    sketch = Sketch()
    tangent = sketch.input("tangents_1", 8, 8)
    values = [sketch.input("x", 8, 8), sketch.input("w", 8, 8)]
    for _ in range(draw(st.integers(1, 8))):
        a, b = (values[draw(st.integers(0, len(values) - 1))] for _ in range(2))
        kind = draw(st.sampled_from(("sin", "add", "mm", "sum", "permute", "half", "rand")))
        if kind == "sum":
            values.append(sketch.op(aten.sum.dim_IntList, a, [1], True))
        elif kind == "half":
            values.append(sketch.op(aten.slice.Tensor, a, 0, 0, max(1, a.meta["val"].shape[0] // 2)))
        elif kind == "permute":
            values.append(sketch.op(aten.permute.default, a, [1, 0]))
        elif kind == "rand":
            values.append(sketch.op(aten.rand_like.default, a))
        elif kind == "sin":
            values.append(sketch.op(aten.sin.default, a))
        else:
            square = [v for v in values if v.meta["val"].shape == (8, 8)]
            a, b = (square[draw(st.integers(0, len(square) - 1))] for _ in range(2))
            values.append(sketch.op(aten.mm.default if kind == "mm" else aten.add.Tensor, a, b))
    read_back = draw(st.lists(st.sampled_from(values), min_size=1, max_size=4, unique=True))
    grads = [sketch.op(aten.mul.Tensor, v, sketch.op(aten.sum.default, tangent), backward=True) for v in read_back]
    return sketch.module([*(sketch.op(aten.neg.default, v) for v in values[2:]), *grads])


def every_choice(gm: fx.GraphModule, problem: find_frontier._Problem, joint: Joint) -> set[tuple[float, int]]:
    """Time and bytes of each way to split the ops, found without a network."""
    ops = [n for n in problem._own if not joint.is_view(n)]
    free = [n for n in ops if not is_random(n) and not any(map(is_random, n.all_input_nodes))]
    found = set()
    for chosen in itertools.product((False, True), repeat=len(free)):
        again = {n for n, yes in zip(free, chosen, strict=True) if yes}
        wanted, seen, saved = list(problem._readers), set(), set()
        wanted += [v for v in joint.layers[WHOLE_GRAPH].outside if joint.backward_readers_of_outside(v, problem._layer)]
        while wanted:
            node = joint.base[wanted.pop()]
            if node in again and node not in seen:
                wanted += joint.inputs[node]
            seen.add(node)
            if node not in again and node.name != "w":
                saved.add(node)
        time = sum(problem._op_ms(n) for n in seen & again)
        time += sum(problem._save_ms(n) for n in saved if n.op == "call_function")
        found.add((time, sum(layout_bytes(n) for n in saved)))
    return found


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(random_layers(), st.floats(-9, 0))
def test_a_cut_is_the_best_of_all_choices(gm: fx.GraphModule, exponent: float) -> None:
    joint = Joint(
        gm,
        len(output_values(gm.graph))
        - sum(n.meta.get("partitioner_tag") == "is_backward" for n in gm.graph.output_node().all_input_nodes),
        {2},
    )
    problem = find_frontier._Problem(joint, joint.layers[WHOLE_GRAPH], Rates(), set())
    choices = every_choice(gm, problem, joint)
    ms_per_byte = 10**exponent
    per_ms, per_byte = find_frontier._PER_MS, find_frontier._PER_BYTE
    weight = max(1, round(ms_per_byte * per_ms / per_byte))
    cut = problem.network.cheapest(1, weight)
    found = cut.first / per_ms + weight / per_ms * cut.second
    best = min(ms + weight / per_ms * nbytes * per_byte for ms, nbytes in choices)
    assert found == pytest.approx(best, rel=2e-3)
    # The point describes the cut.
    assert problem.point(cut.behind).nbytes == pytest.approx(cut.second / per_byte)
    for other in problem.network.best_cuts(100):
        assert any(
            nbytes * per_byte == other.second and ms == pytest.approx(other.first / per_ms, rel=2e-3)
            for ms, nbytes in choices
        )


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_corners_are_what_all_cuts_have_for_corners(data: st.DataObject) -> None:
    network = Network()
    inner = [network.node() for _ in range(data.draw(st.integers(1, 6)))]
    price = st.tuples(st.integers(0, 9), st.integers(0, 9))
    for node in inner:
        network.edge(SOURCE, node, data.draw(price))
        network.edge(node, SINK, data.draw(price))
    for tail, head in itertools.permutations(inner, 2):
        if data.draw(st.booleans()):
            network.edge(tail, head, data.draw(st.one_of(price, st.none())))

    def prices(behind: set[int]) -> tuple[int, int] | None:
        cut = [p for tail, head, p in network.edges if head in behind and tail not in behind]
        return None if None in cut else (sum(p[0] for p in cut if p), sum(p[1] for p in cut if p))

    sides = [
        {SINK, *(n for n, b in zip(inner, bits, strict=True) if b)}
        for bits in itertools.product((0, 1), repeat=len(inner))
    ]
    everything = {p for side in sides if (p := prices(side)) is not None}
    found = network.best_cuts(100)
    assert all(prices(set(c.behind)) == (c.first, c.second) for c in found)
    corners = [(c.first, c.second) for c in found]
    assert corners == sorted(set(corners))
    for a in range(1, 12):
        for b in range(1, 12):
            least = min(a * x + b * y for x, y in everything)
            assert min(a * x + b * y for x, y in corners) == least


def test_a_path_without_prices_cannot_be_cut() -> None:
    network = Network()
    node = network.node()
    network.edge(SOURCE, node)
    network.edge(node, SINK)
    with pytest.raises(ValueError, match="a path of edges that must not be cut"):
        network.cheapest(1, 1)


# -- details -----------------------------------------------------------------------------------------------------------


def test_parameters_cost_nothing_and_other_inputs_do() -> None:
    sketch = Sketch()
    x, w, tangent = sketch.input("x", 8, 8), sketch.input("w", 8, 8), sketch.input("tangents_1", 8, 8)
    out = sketch.op(aten.mm.default, x, w)
    gm = sketch.module([out, read(sketch, tangent, x, w)])
    (c,) = FindFrontier(Rates(), num_forward_outputs=1, static_inputs=[1])(gm)
    assert [[c.name_at(WHOLE_GRAPH, s.position) for s in p.saved] for p in c.points] == [["x"]]
    assert c.points[0].saved[0].position == -1


def test_equal_ops_of_several_layers_count_as_one() -> None:
    sketch = Sketch()
    x, mask, tangent = (sketch.input(n, 8, 8) for n in ("x", "mask", "tangents_1"))
    outside = sketch.op(aten.sin.default, mask)
    masks = []
    for i in range(3):
        masks.append(sketch.op(aten.exp.default, outside, path=f"layers.{i}"))
        x = sketch.op(aten.mm.default, x, masks[i], path=f"layers.{i}")
    for i in reversed(range(3)):
        tangent = sketch.op(aten.mul.Tensor, tangent, masks[i], path=f"layers.{i}", backward=True)
    gm = sketch.module([sketch.op(aten.neg.default, x), tangent])
    AnnotateLayers()(gm)
    classes = FindFrontier(Rates(), num_forward_outputs=1)(gm)
    assert [c.layers for c in classes] == [("layers.0",), ("layers.1", "layers.2")]
    names = [saved_names(c, label, c.points[0]) for c in classes for label in c.layers]
    assert names == [{"exp": 256}] * 3
    assert classes[1].points[0].nbytes == 128


def test_an_unknown_layer_lists_the_known() -> None:
    found = untouched("tower")
    point = found.classes[0].points[0]
    with pytest.raises(ValueError, match=r"unknown layers \['layers.9'\]; the graph has 'layers.0', 'layers.1'"):
        TagRecompute({"layers.9": point})(found.captured.joint)


@pytest.mark.slow
def test_a_large_joint_graph_takes_little_time() -> None:
    """80 layers, 50,000 nodes. What looks at all nodes again for each takes minutes; a slow machine took 5.1 s of the
    first limit."""
    graph = fx.Graph()
    with FakeTensorMode():
        values = {name: torch.empty(64, 64) for name in ("x", "tangents_1", "value")}

    def op(target: Any, *args: fx.Node, layer: int, backward: bool = False) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta |= {"val": values["value"], LAYER_KEY: f"layers.{layer}"}
        if backward:
            node.meta["partitioner_tag"] = "is_backward"
        return node

    x, tangent = graph.placeholder("x"), graph.placeholder("tangents_1")
    x.meta["val"], tangent.meta["val"] = values["x"], values["tangents_1"]
    made: list[list[fx.Node]] = []
    for i in range(80):
        made.append([x])
        for k in range(310):
            target = aten.mm.default if k % 40 == 0 else aten.mul.Tensor if k % 3 else aten.add.Tensor
            made[i].append(op(target, made[i][-1], made[i][-1 - k % 7 % len(made[i])], layer=i))
        x = made[i][-1]
    for i in reversed(range(80)):
        for value in reversed(made[i]):
            tangent = op(aten.mul.Tensor, tangent, value, layer=i, backward=True)
    graph.output((x, tangent))
    gm = fx.GraphModule({}, graph)
    assert len(gm.graph.nodes) > 49_000
    start = time.process_time()
    classes = FindFrontier(Rates(), num_forward_outputs=1)(gm)
    seconds = time.process_time() - start
    assert max(len(c.layers) for c in classes) >= 78
    assert all(len(c.points) > 3 for c in classes)
    assert seconds < 10
    start = time.process_time()
    TagRecompute({label: c.points[1] for c in classes for label in c.layers})(gm)
    assert time.process_time() - start < 4
