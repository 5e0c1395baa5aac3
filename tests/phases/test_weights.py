"""Streams of weights on one process: names, values, memory and ends."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fxoffload.errors import UnsupportedError
from fxoffload.phases.manager import PhaseManager
from fxoffload.phases.weight_sync import bucket_stream
from fxoffload.phases.weight_sync.buckets import Load, plan_buckets
from fxoffload.phases.weight_sync.cuts import TensorCut, boxes, region
from fxoffload.phases.weight_sync.weights import stream_weights, weights_on_device
from tests.marks import examples
from tests.phases.delayed import DelayedCopies


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.transposed = nn.Parameter(torch.randn(6, 9).t())
        self.channels = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("kept", torch.arange(5))
        self.register_buffer("forgotten", torch.randn(5), persistent=False)
        fused = torch.randn(12, 4)
        self.q, self.k = nn.Parameter(fused[:7]), nn.Parameter(fused[7:])
        self.narrow = nn.Parameter(fused[:, 1:3])

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.embed(x))


@pytest.fixture(params=["device", "host"])
def manager(request: pytest.FixtureRequest) -> Iterator[PhaseManager]:
    manager = PhaseManager(Model(), device_types=("cpu",))
    manager.values = reference(manager.models[""])  # type: ignore[attr-defined]
    if request.param == "host":
        manager.offload("params", "buffers")
    yield manager
    manager.close()


def reference(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def values_of(manager: PhaseManager) -> dict[str, Tensor]:
    return manager.values  # type: ignore[attr-defined]


@pytest.mark.parametrize("bucket", [32, 100, 257, 1000, 4096, "1MiB"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_values_shapes_and_memory(manager: PhaseManager, bucket: int | str, dtype: torch.dtype | None) -> None:
    expected = values_of(manager)
    stream = stream_weights(manager, bucket, dtype=dtype)
    seen = []
    for name, tensor in stream:
        seen.append(name)
        wanted = expected[name]
        wanted = wanted.to(dtype) if dtype is not None and wanted.is_floating_point() else wanted
        assert tensor.dtype == wanted.dtype and tensor.shape == wanted.shape
        assert tensor.is_contiguous() and not tensor.requires_grad
        assert torch.equal(tensor, wanted), name
    assert sorted(seen) == sorted(expected)
    assert 0 < stream.ledger.peak_bytes <= stream.ledger.limit_bytes
    assert stream.ledger.held_bytes == 0
    # The promise, from the state dict alone.
    largest = max(t.numel() * (dtype or t.dtype).itemsize for t in expected.values())
    buckets = 1 << 20 if bucket == "1MiB" else int(bucket)
    assert stream.ledger.limit_bytes == 2 * buckets + largest


def test_order_is_that_of_the_state_dict_and_tied_names_come_together(manager: PhaseManager) -> None:
    names = [name for name, _ in stream_weights(manager, 300)]
    order = [name for name in values_of(manager) if name != "head.weight"]
    assert [name for name in names if name != "head.weight"] == order
    assert names[names.index("embed.weight") + 1] == "head.weight"
    assert "forgotten" not in names


def test_tied_weights_are_copied_once(manager: PhaseManager) -> None:
    tensors = dict(stream_weights(manager, "1MiB"))
    assert tensors["embed.weight"].data_ptr() == tensors["head.weight"].data_ptr()


def test_the_model_stays_where_it_is(manager: PhaseManager) -> None:
    before = manager.state
    list(stream_weights(manager, 300))
    assert manager.state == before


@pytest.mark.parametrize("bucket", [100, 500, "1MiB"])
@pytest.mark.parametrize(
    "keep",
    [
        lambda tensor: tensor,
        lambda tensor: tensor.view(-1).view(tensor.shape),
        lambda tensor: tensor.detach(),
        lambda tensor: torch.from_numpy(tensor.numpy()),
        lambda tensor: torch.from_dlpack(tensor),
    ],
    ids=["itself", "view", "detach", "numpy", "dlpack"],
)
def test_what_is_kept_of_a_stream_keeps_its_values(
    manager: PhaseManager, keep: Callable[[Tensor], Tensor], bucket: int | str
) -> None:
    stream = stream_weights(manager, bucket)
    assert bucket == "1MiB" or len(stream.plan.buckets) > 3
    kept = {name: keep(tensor) for name, tensor in stream}
    for name, wanted in values_of(manager).items():
        assert torch.equal(kept[name], wanted), name


def test_a_stream_as_a_dict_is_the_model_and_can_be_saved(manager: PhaseManager, tmp_path: Path) -> None:
    kept = dict(stream_weights(manager, 300))
    torch.save(kept, tmp_path / "weights.pt")
    found = torch.load(tmp_path / "weights.pt")
    for name, wanted in values_of(manager).items():
        assert torch.equal(found[name], wanted), name
    del kept["head.weight"]  # tied
    sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in kept.items()}
    assert sizes == {name: tensor.nbytes for name, tensor in kept.items()}, "who keeps one keeps no others"


def test_what_is_written_to_a_weight_stays_there(manager: PhaseManager) -> None:
    for name, tensor in stream_weights(manager, 300):
        assert torch.equal(tensor, values_of(manager)[name])
        if name != "embed.weight":  # tied: the next name is of the same tensor
            tensor.zero_()
    for name, tensor in stream_weights(manager, 300):
        assert torch.equal(tensor, values_of(manager)[name])


def test_a_stream_holds_nothing_of_what_was_handed_out(manager: PhaseManager) -> None:
    names = {"embed.weight", "body.0.weight", "transposed", "channels", "q"}
    seen: list[weakref.ref[Any]] = []
    for name, tensor in stream_weights(manager, 300, names=names):
        assert [weak() for weak in seen[:-1]] == [None] * len(seen[:-1]), "the last one but this may be the loop's"
        seen.append(weakref.ref(tensor))
        assert name in names
    assert len(seen) == 5


def test_wrappers_leave_no_trace_in_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = Model()
    expected = reference(inner)
    inner.body[0] = checkpoint_wrapper(inner.body[0])
    wrapped = torch.compile(inner, backend="eager")
    manager = PhaseManager(wrapped, device_types=("cpu",))  # type: ignore[arg-type]
    assert {name for name, _ in stream_weights(manager)} == set(expected)
    manager.close()
    parallel = nn.DataParallel(inner)
    manager = PhaseManager(parallel, device_types=("cpu",))
    assert {name for name, _ in stream_weights(manager)} == set(expected)


def test_a_module_called_module_keeps_its_name() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert [name for name, _ in stream_weights(PhaseManager(model, device_types=("cpu",)))] == [
        "module.weight",
        "module.bias",
    ]


def test_some_names_only(manager: PhaseManager) -> None:
    found = [name for name, _ in stream_weights(manager, names=["head.weight", "kept"])]
    assert sorted(found) == ["head.weight", "kept"]
    with pytest.raises(ValueError, match=r"found 'head.weigth'; there are 'head.weight'"):
        stream_weights(manager, names=["head.weigth"])


def test_ends_early_and_frees_everything(manager: PhaseManager) -> None:
    stream = stream_weights(manager, 300)
    name, tensor = next(stream)
    alive = weakref.ref(tensor.untyped_storage())
    assert stream.ledger.held_bytes > 0
    stream.close()
    del tensor
    assert stream.ledger.held_bytes == 0 and alive() is None
    with pytest.raises(StopIteration):
        next(stream)
    with pytest.raises(KeyError), stream_weights(manager, 300) as second:
        for name, _ in second:
            raise KeyError(name)
    assert second.ledger.held_bytes == 0
    assert {name for name, _ in stream_weights(manager, 300)} == set(values_of(manager))


def test_the_model_may_return_while_it_is_streamed() -> None:
    manager = PhaseManager(Model(), device_types=("cpu",))
    expected = reference(manager.models[""])
    manager.offload("params", "buffers")
    for i, (name, tensor) in enumerate(stream_weights(manager, 200)):
        assert torch.equal(tensor, expected[name])
        if i == 3:
            manager.onload("params", wait=False)
        if i == 8:
            manager.offload("params", wait=False)


def test_host_memory_is_not_released_while_weights_are_copied_from_it() -> None:
    copies = DelayedCopies()
    manager = PhaseManager(Model(), device_types=("cpu",), make_copies=lambda device: copies)
    expected = reference(manager.models[""])
    manager.offload("params", "buffers").wait()
    arriving = manager.onload("params", "buffers", wait=False)
    stream = stream_weights(manager, 300)
    kept = dict([next(stream)])  # what comes next is being copied from the host
    arriving.wait()
    assert manager.release_host_memory() > 0
    assert not copies.is_busy
    kept |= stream
    assert {name: torch.equal(kept[name], value) for name, value in expected.items()} == dict.fromkeys(expected, True)
    manager.close()


def test_the_ledger_holds_a_stream_to_its_promise() -> None:
    ledger = bucket_stream.BucketLedger(100)
    cpu = torch.device("cpu")
    first = ledger.take((15, 2), torch.int16, cpu)
    with pytest.raises(AssertionError, match="bug in fxoffload"):
        ledger.take((41,), torch.uint8, cpu)
    with ledger.charged(40), pytest.raises(AssertionError, match="bug in fxoffload"):
        ledger.charge(1)
    ledger.give_back(first)
    assert ledger.take((25,), torch.float32, cpu).numel() == 25 and ledger.peak_bytes == 100


def test_refusals(manager: PhaseManager) -> None:
    with pytest.raises(ValueError, match=r"floating dtype .* found torch.int8"):
        stream_weights(manager, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"bucket_bytes is 3 B, .*one element of 'transposed'"):
        stream_weights(manager, 3)
    with pytest.raises(ValueError, match="bucket_bytes is 'much'"):
        stream_weights(manager, "much")
    with pytest.raises(ValueError, match=r"model= as one of '', found 'critic'"):
        stream_weights(manager, model="critic")


def test_the_bucket_that_a_refusal_names_is_large_enough() -> None:
    loads = [Load("w", "lane", 8, 40, 4, 2, 320 * 2), Load("b", None, 1, 3, 8, 8, 24)]
    with pytest.raises(ValueError, match=r"8 ranks; give at least (\d+) B") as refused:
        plan_buckets(loads, 8)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    assert plan_buckets(loads, least).buckets


def test_several_models_are_told_apart() -> None:
    models = {"actor": nn.Linear(2, 3), "critic": nn.Linear(2, 1)}
    manager = PhaseManager(models, device_types=("cpu",))
    with pytest.raises(ValueError, match=r"'actor', 'critic', found none"):
        stream_weights(manager)
    shapes = {name: tuple(tensor.shape) for name, tensor in stream_weights(manager, model="critic")}
    assert shapes == {"weight": (1, 2), "bias": (1,)}


def test_what_has_no_values_is_refused() -> None:
    manager = PhaseManager(nn.Linear(2, 2, device="meta"), device_types=("cpu",))
    with pytest.raises(UnsupportedError, match="'weight' has no values"):
        stream_weights(manager)


def test_weights_on_device_loads_and_takes_back() -> None:
    manager = PhaseManager(Model(), device_types=("cpu",))
    expected = reference(manager.models[""])
    with weights_on_device(manager) as weights:
        assert {name: torch.equal(weights[name], value) for name, value in expected.items()} == dict.fromkeys(
            expected, True
        )
    assert weights.load_seconds == 0.0 and weights.offload_seconds == 0.0
    assert manager.transitions == [] and manager.where("params").value == "device"
    manager.offload("params", "buffers")
    with pytest.raises(KeyError), weights_on_device(manager) as weights:
        assert weights["embed.weight"] is weights["head.weight"]
        assert torch.equal(weights["transposed"], expected["transposed"])
        assert weights.load_seconds > 0.0 and weights.offload_seconds == 0.0
        raise KeyError
    assert weights.offload_seconds > 0.0 and not weights
    assert manager.where("params").value == "host"


def test_weights_on_device_takes_back_only_what_was_away() -> None:
    manager = PhaseManager(Model(), device_types=("cpu",))
    manager.offload("buffers")
    with weights_on_device(manager):
        assert manager.where("buffers").value == "device"
    assert manager.where("buffers").value == "host" and manager.where("params").value == "device"


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
@settings(deadline=None, max_examples=examples(60))
def test_boxes_hold_the_elements_in_order(sizes: list[int], data: st.DataObject) -> None:
    total = math.prod(sizes)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    array = torch.arange(total).view(sizes)
    found: list[int] = []
    for starts, extents in boxes(sizes, start, stop):
        part = array[tuple(slice(s, s + n) for s, n in zip(starts, extents, strict=True))]
        found += part.reshape(-1).tolist()
    assert found == list(range(start, stop))


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 4))
@settings(deadline=None, max_examples=examples(60))
def test_regions_are_what_chunk_gives(extent: int, first: int, second: int) -> None:
    cuts = [TensorCut(0, first, 0, None), TensorCut(0, second, 0, None)]
    array = torch.arange(extent)
    for i in range(first):
        outer = list(array.chunk(first)) + [array[:0]] * first
        for j in range(second):
            inner = list(outer[i].chunk(second)) + [array[:0]] * second
            (start,), (size,) = region((extent,), cuts, (i, j))
            assert torch.equal(array[start : start + size], inner[j])


@given(
    st.lists(st.tuples(st.sampled_from(["lane", "other", None]), st.integers(0, 3000)), min_size=1, max_size=12),
    st.integers(64, 5000),
    st.sampled_from([2, 4]),
    st.sampled_from([2, 4]),
)
@settings(deadline=None, max_examples=examples(150))
def test_plans_move_everything_once_and_keep_their_promise(
    items: list[tuple[str | None, int]], bucket: int, source: int, out: int
) -> None:
    ranks = {"lane": 2, "other": 3, None: 1}
    loads = [
        Load(str(i), lane, ranks[lane], -(-numel // ranks[lane]), source, min(source, out), numel * out)
        for i, (lane, numel) in enumerate(items)
    ]
    try:
        plan = plan_buckets(loads, bucket)
    except ValueError as refused:
        assert "give at least" in str(refused) and bucket < 1000
        return
    is_gathered = any(lane for lane, _ in items)
    is_cast = out < source and any(lane and numel for lane, numel in items)
    assert plan.landings == (3 if is_gathered and not is_cast else 2)
    assert is_cast or plan.stage_bytes == 0
    buffers = plan.stage_bytes + plan.landings * plan.landing_bytes + max(bucket.out_bytes for bucket in plan.buckets)
    assert buffers <= 2 * bucket
    moved: dict[int, int] = dict.fromkeys(range(len(loads)), 0)
    order = []
    for b in plan.buckets:
        ends_large = [p for p in b.finished if p.start > 0]
        assert not ends_large or len(b.finished) == 1
        order += [p.index for p in b.finished]
        for lane in b.lanes:
            at = 0
            for p in lane.pieces:
                assert p.start == moved[p.index] and p.landed == at
                moved[p.index] = p.stop
                at += -(-(p.stop - p.start) * (source if lane.key is None else min(source, out)) // 16) * 16
            assert at == lane.slot_bytes
    assert order == list(range(len(loads)))
    assert moved == {i: load.elements for i, load in enumerate(loads)}


@pytest.mark.parametrize("away", [False, True])
def test_wrapper_subclasses_are_handed_out_as_what_is_inside(away: bool) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(3, 2)
    first, second = torch.randn(2, 3), torch.randn(2, 3)
    model.weight = nn.Parameter(TwoTensor(first.clone(), second.clone()))
    manager = PhaseManager(model, device_types=("cpu",))
    if away:
        manager.offload("params")
    found = {name: tensor.clone() for name, tensor in stream_weights(manager, dtype=torch.bfloat16)}
    assert list(found) == ["weight.a", "weight.b", "bias"]
    # Only who quantized knows what a cast of the parts would mean.
    assert torch.equal(found["weight.a"], first) and torch.equal(found["weight.b"], second)
    assert found["bias"].dtype == torch.bfloat16
    manager.close()


def test_the_first_buckets_are_smaller() -> None:
    model = nn.ParameterList(nn.Parameter(torch.ones(256)) for _ in range(120))  # 1 KiB each
    manager = PhaseManager(model, device_types=("cpu",))
    sizes = [bucket.out_bytes for bucket in manager.stream_weights(16 << 10).plan.buckets]
    whole = max(sizes)
    assert len(sizes) > 5
    assert [size * 8 <= whole * 2**i for i, size in enumerate(sizes[:4])] == [True] * 4
    assert sizes[3] == sizes[4] == whole
