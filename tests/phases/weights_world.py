"""One rank of ``test_weights_sharded``: streams sharded models (gloo, CPU), writes down what differed.

python weights_world.py FOLDER RANK WORLD CASE...
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fxoffload.phases.manager import PhaseManager
from fxoffload.phases.weight_sync.weights import stream_weights
from fxoffload.torch_private import process_groups

Found = dict[str, Any]


class Block(nn.Module):
    """Extents that two ranks do not share evenly, and a bias with fewer elements than ranks."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)
        self.gate = nn.Linear(width, 1)
        self.register_buffer("scale", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (
            x + self.gate(x).sigmoid() * self.down(torch.relu(self.up(self.norm(x)))) * self.get_buffer("scale").sum()
        )


class Model(nn.Module):
    def __init__(self, width: int = 8, hidden: int = 12, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(2))
        self.head = nn.Linear(width, 13, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def fsdp2_even(rank: int, world: int) -> Found:
    return compared(sharded(Model(8, 16)), reference(Model(8, 16)))


def fsdp2_uneven(rank: int, world: int) -> Found:
    return compared(sharded(Model(7, 9, tied=True)), reference(Model(7, 9, tied=True)))


def fsdp2_after_a_step(rank: int, world: int) -> Found:
    """The root module keeps its parameters gathered after a forward; the values are those of after the step."""
    model = sharded(Model(8, 12))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(6)[None]).square().mean().backward()
    optimizer.step()
    whole = {name: gathered(tensor) for name, tensor in model.state_dict().items()}
    return compared(model, whole)


def tensor_parallel(rank: int, world: int) -> Found:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    return compared(split(Model(6, 9), mesh), reference(Model(6, 9)))


def fsdp2_on_tensor_parallel(rank: int, world: int) -> Found:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model = split(Model(8, 12), mesh["tp"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return compared(model, reference(Model(8, 12)))


def hybrid_sharding(rank: int, world: int) -> Found:
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    model = Model(7, 9)
    fully_shard(model, mesh=mesh)
    return compared(model, reference(Model(7, 9)))


def placements(rank: int, world: int) -> Found:
    """Whatever a DTensor may be cut into, also twice along one dimension."""
    shape = (2, world // 2) if world > 2 else (world, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))
    model, whole = nn.Module(), {}
    ways = [Shard(0), Shard(1), Shard(2), Replicate()]
    for i, first in enumerate(ways):
        for j, second in enumerate(ways):
            name = f"w{i}{j}"
            whole[name] = torch.randn(5, 6, 7, generator=torch.Generator().manual_seed(10 * i + j))
            setattr(model, name, nn.Parameter(distribute_tensor(whole[name].clone(), mesh, [first, second])))
    return compared(model, whole)


def mixture_of_experts(rank: int, world: int) -> Found:
    """Three experts on two ranks, which transformers saves one by one; gate and up are cut along another dimension."""
    import transformers

    def made() -> transformers.PreTrainedModel:
        torch.manual_seed(0)
        sizes = dict(hidden_size=8, intermediate_size=12, num_hidden_layers=2, vocab_size=16)
        heads = dict(num_attention_heads=2, num_key_value_heads=1, num_local_experts=3)
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 3 and parameter.shape[1] == 24 else None

    model = made()
    for layer in model.model.layers:
        fully_shard(layer, shard_placement_fn=placement)
    fully_shard(model)
    return compared(model, transformers.core_model_loading.revert_weight_conversion(made(), made().state_dict()))


def fsdp1(rank: int, world: int) -> Found:
    return flattened(use_orig_params=False)


def fsdp1_original_parameters(rank: int, world: int) -> Found:
    return flattened(use_orig_params=True)


def flattened(use_orig_params: bool) -> Found:
    model, whole = Model(7, 9, tied=True), reference(Model(7, 9, tied=True))
    for i, layer in enumerate(model.layers):
        model.layers[i] = FullyShardedDataParallel(
            layer, use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
    wrapped = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    wrapped(torch.arange(6)[None]).square().mean().backward()
    with FullyShardedDataParallel.summon_full_params(wrapped):
        clean = {n.replace("_fsdp_wrapped_module.", ""): p.clone() for n, p in wrapped.named_parameters()}
    assert all(torch.equal(whole[name], value) for name, value in clean.items() if name in whole)
    return compared(wrapped, whole)


def early_close(rank: int, world: int) -> Found:
    """Ends with collectives under way; the next stream is whole again."""
    model, whole = sharded(Model(8, 16)), reference(Model(8, 16))
    manager = PhaseManager(model, device_types=("cpu",))
    manager.offload("params")
    with stream_weights(manager, 600) as stream:
        next(stream)
    held = stream.ledger.held_bytes
    with counted() as calls:
        difference = differing(stream_weights(manager, 600), whole)
    return {"held": held, "differing": difference, "collectives": len(calls)}


class counted:
    """The collectives in a block."""

    def __enter__(self) -> list[int]:
        self._real, calls = process_groups.all_gather, []

        def call(whole: Tensor, part: Tensor, group: Any) -> Any:
            calls.append(whole.numel())
            return self._real(whole, part, group)

        process_groups.all_gather = call
        return calls

    def __exit__(self, *exception: object) -> None:
        process_groups.all_gather = self._real


def compared(model: nn.Module, whole: dict[str, Tensor]) -> Found:
    """Streams with several sizes of buckets, from the device and from the host image."""
    manager = PhaseManager(model, device_types=("cpu",))
    found: Found = {"differing": [], "names": [], "peaks": [], "collectives": [], "local": []}
    for place in ("device", "host"):
        if place == "host":
            manager.offload("params", "buffers")
        for bucket in (256, 700, 3000, 1 << 20):
            for dtype in (None, torch.bfloat16, torch.float64):
                stream = stream_weights(manager, bucket, dtype=dtype)
                with counted() as calls:
                    wrong = differing(stream, whole, dtype)
                found["differing"] += [(place, bucket, str(dtype), *one) for one in wrong]
                found["peaks"].append((stream.ledger.peak_bytes, stream.plan.limit_bytes, stream.ledger.held_bytes))
                lanes = sum(lane.key is not None for b in stream.plan.buckets for lane in b.lanes)
                found["collectives"].append((len(calls), len(stream.plan.buckets), lanes))
        found["local"].append(local_parts(manager, model))
        found["names"].append([name for name, _ in stream_weights(manager)])
    return found


def local_parts(manager: PhaseManager, model: nn.Module) -> list[str]:
    """Names whose own part is not what the module holds."""
    expected = {}
    for name, tensor in model.named_parameters():
        plain = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        expected[name.replace("_fsdp_wrapped_module.", "")] = manager.host_copy(plain)
    wrong = []
    for name, tensor in stream_weights(manager, 512, full=False):
        if name in expected and not torch.equal(tensor.reshape(-1), expected[name].reshape(-1)):
            wrong.append(name)
    return wrong


def differing(
    stream: Iterator[tuple[str, Tensor]], whole: dict[str, Tensor], dtype: torch.dtype | None = None
) -> list[tuple[str, str]]:
    wrong, found = [], dict(stream)
    for name, tensor in found.items():
        expected = whole[name].to(dtype) if dtype is not None else whole[name]
        is_own = type(tensor) is Tensor and tensor.untyped_storage().nbytes() == tensor.nbytes
        if not torch.equal(tensor, expected) or not tensor.is_contiguous() or not is_own:
            wrong.append((name, f"{tuple(tensor.shape)} {tensor.dtype}"))
    return wrong + [(name, "missing") for name in whole.keys() - found.keys()]


def sharded(model: Model) -> Model:
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def split(model: Model, mesh: Any) -> Model:
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def reference(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


CASES: dict[str, Callable[[int, int], Found]] = {
    case.__name__: case
    for case in (
        fsdp2_even,
        fsdp2_uneven,
        fsdp2_after_a_step,
        tensor_parallel,
        fsdp2_on_tensor_parallel,
        hybrid_sharding,
        placements,
        fsdp1,
        fsdp1_original_parameters,
        mixture_of_experts,
        early_close,
    )
}


def main(folder: Path, rank: int, world: int, cases: list[str]) -> None:
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store)
    found: Found = {}
    for case in cases:
        try:
            found[case] = CASES[case](rank, world)
        except Exception:
            found[case] = {"raised": traceback.format_exc()}
            break
        finally:
            (folder / f"found{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
