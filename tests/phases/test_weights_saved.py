"""Weights of transformers models are handed out as ``save_pretrained`` writes them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("transformers")
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, core_model_loading
from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter, WeightRenaming

from fxoffload.errors import UnsupportedError
from fxoffload.phases import PhaseManager
from fxoffload.torch_private import transformers as transformers_private
from tests.marks import slow
from tests.phases.tiny_transformers import saved_weights, tiny_families, tiny_model

# What differs in memory: experts fused one way or another, names, prefixes, tied weights, values that are computed.
FAMILIES = (
    *("qwen3_moe", "mixtral", "deepseek_v2", "gpt_oss", "jamba", "granitemoe", "minimax", "ernie4_5_moe", "nllb-moe"),
    *("llava", "qwen2_vl", "gemma3", "internvl", "t5", "marian", "llama", "inkling2_loop_text"),
)
MORE = (
    *("qwen2_moe", "deepseek_v3", "olmoe", "flex_olmo", "glm4_moe", "phimoe", "jetmoe", "hunyuan_v1_moe", "lfm2_moe"),
    *("zaya", "qwen3_next", "afmoe", "mistral3", "paligemma", "aria", "idefics3", "bart", "bert", "gpt2"),
)


def managed(model: nn.Module | Mapping[str, nn.Module]) -> PhaseManager:
    return PhaseManager(model, device_types=("cpu",))


def streamed(model: nn.Module, bucket_bytes: int | str = "16KiB", **options: Any) -> dict[str, Tensor]:
    manager = managed(model)
    stream = manager.stream_weights(bucket_bytes, **options)
    found = dict(stream)
    assert 0 < stream.ledger.peak_bytes <= stream.ledger.limit_bytes and stream.ledger.held_bytes == 0
    manager.close()
    return found


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, wanted in expected.items():
        assert (found[name].dtype, found[name].shape) == (wanted.dtype, wanted.shape), name
        assert torch.equal(found[name], wanted), name
        assert found[name].is_contiguous() and not found[name].requires_grad, name


@pytest.fixture
def mixtral() -> PreTrainedModel:
    """Its fused experts are cut into parts, and ``mlp`` is called ``block_sparse_moe`` in checkpoints."""
    model = tiny_model("mixtral")
    assert "model.layers.0.mlp.experts.gate_up_proj" in model.state_dict()
    return model


@pytest.mark.parametrize("family", [*FAMILIES, *map(slow, MORE)])
def test_families(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    model = tiny_model(family)
    assert_equal(streamed(model), saved_weights(model))


@pytest.mark.slow
def test_all_families() -> None:
    compared = 0
    for family, model in tiny_families(most_parameters=3_000_000):
        found, expected = streamed(model), saved_weights(model)
        assert set(found) == set(expected), family
        assert all(torch.equal(found[name], wanted) for name, wanted in expected.items()), family
        compared += 1
    assert compared > 150


def test_from_the_host_image_in_any_bucket_and_dtype(mixtral: PreTrainedModel) -> None:
    expected = saved_weights(mixtral)
    manager = managed(mixtral)
    manager.offload("params", "buffers")
    for bucket in ("2KiB", "100KiB", "1GiB"):
        for dtype in (None, torch.bfloat16):
            stream = manager.stream_weights(bucket, dtype=dtype)
            assert_equal(dict(stream), {name: t.to(dtype or t.dtype) for name, t in expected.items()})
            assert stream.ledger.held_bytes == 0
            assert stream.ledger.peak_bytes <= stream.ledger.limit_bytes
    assert manager.where("params").value == "host"
    manager.close()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_under_inference_mode(family: str) -> None:
    """Other operators run there; and plans made there are remembered."""
    model = tiny_model(family)
    expected, manager = saved_weights(model), managed(model)
    with torch.inference_mode():
        assert_equal(dict(manager.stream_weights("16KiB")), expected)
        with manager.weights_on_device() as weights:
            assert all(torch.equal(weights[name], wanted) for name, wanted in expected.items())
    assert_equal(dict(manager.stream_weights("16KiB")), expected)
    manager.close()


def test_the_memory_of_what_is_made_is_that_of_one_tensor() -> None:
    model = tiny_model("qwen3_moe", moe_intermediate_size=256)
    fused = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    stream = managed(model).stream_weights("4KiB")
    one = fused[0].nbytes // 2
    assert stream.ledger.limit_bytes == 2 * 4096 + fused.nbytes + one
    sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in stream}
    assert sizes["model.layers.0.mlp.experts.3.up_proj.weight"] == one, "who keeps one expert keeps no others"


def test_names_as_they_are_in_memory(mixtral: PreTrainedModel) -> None:
    expected = mixtral.state_dict()
    assert_equal(streamed(mixtral, as_saved=False), expected)
    assert_equal(streamed(mixtral, full=False), expected)
    with pytest.raises(ValueError, match="expected as_saved=True with full=True"):
        streamed(mixtral, full=False, as_saved=True)


def test_some_names_and_what_they_need_only(mixtral: PreTrainedModel) -> None:
    expected = saved_weights(mixtral)
    experts = "model.layers.1.block_sparse_moe.experts"
    names = [f"{experts}.2.w3.weight", f"{experts}.0.w1.weight", "model.norm.weight"]
    manager = managed(mixtral)
    for _ in range(2):  # planned, and remembered
        stream = manager.stream_weights(names=names)
        fused = mixtral.get_parameter("model.layers.1.mlp.experts.gate_up_proj").nbytes
        assert stream.nbytes == fused + expected["model.norm.weight"].nbytes
        assert_equal(dict(stream), {name: expected[name] for name in names})
    with pytest.raises(ValueError, match=r"found 'model\.layers\.1\.mlp\.gate\.weight'; .*give as_saved=False"):
        manager.stream_weights(names=["model.layers.1.mlp.gate.weight"])
    manager.close()


def compiled(model: PreTrainedModel) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def compiled_by_layer(model: PreTrainedModel) -> nn.Module:
    layers = model.get_submodule("model.layers")
    for name, layer in list(layers.named_children()):
        setattr(layers, name, torch.compile(layer, backend="eager"))
    return model


def checkpointed(model: PreTrainedModel) -> nn.Module:
    model.model = checkpoint_wrapper(model.model)  # type: ignore[assignment]
    return model


def data_parallel(model: PreTrainedModel) -> nn.Module:
    return nn.DataParallel(model)


@pytest.mark.parametrize("family", ["mixtral", "llava"])
@pytest.mark.parametrize("wrapped", [compiled, compiled_by_layer, checkpointed, data_parallel])
def test_wrappers_change_nothing(family: str, wrapped: Any) -> None:
    model = tiny_model(family)
    if family == "llava" and wrapped is compiled_by_layer:
        # A model in the model: its conversions are known by where it is.
        expected = saved_weights(model)
        model.model.language_model = torch.compile(model.model.language_model, backend="eager")
        assert_equal(streamed(model), expected)
        return
    expected = saved_weights(model)
    assert_equal(streamed(wrapped(model)), expected)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("family", ["qwen3_moe", "llava"])
def test_fully_sharded_classes_are_known(one_rank: None, family: str) -> None:
    model = tiny_model(family)
    expected = saved_weights(model)
    for module in reversed([m for m in model.modules() if isinstance(m, PreTrainedModel)]):
        fully_shard(module)
    assert type(model).__name__.startswith("FSDP")
    assert_equal(streamed(model), expected)


def test_a_model_in_another_module_keeps_the_prefix(mixtral: PreTrainedModel) -> None:
    class WithValues(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.values = mixtral, nn.Linear(4, 1)

    expected = {f"policy.{name}": tensor for name, tensor in saved_weights(mixtral).items()}
    model = WithValues()
    expected |= {f"values.{name}": tensor.detach() for name, tensor in model.values.named_parameters()}
    assert_equal(streamed(model), expected)


def test_two_models_side_by_side() -> None:
    models = {"actor": tiny_model("mixtral"), "critic": tiny_model("qwen3_moe")}
    both = nn.ModuleDict(models)
    expected = {f"{prefix}.{name}": t for prefix, model in models.items() for name, t in saved_weights(model).items()}
    assert_equal(streamed(both), expected)
    manager = managed(models)
    assert_equal(dict(manager.stream_weights(model="critic")), saved_weights(models["critic"]))
    manager.close()


def test_a_model_that_was_loaded_is_saved_as_it_was_found(mixtral: PreTrainedModel, tmp_path: Path) -> None:
    mixtral.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert transformers_private.conversions_of(loaded)
    assert_equal(streamed(loaded), saved_weights(mixtral))


def test_tied_weights_are_sent_once_under_the_name_that_is_saved() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    assert "lm_head.weight" in model.state_dict() and "lm_head.weight" not in streamed(model)
    assert_equal(streamed(model), saved_weights(model))
    assert_equal(streamed(model, as_saved=False), model.state_dict())
    # Tied by hand: another parameter over the same memory. Such a model cannot be saved, and every name is sent.
    model = tiny_model("llama", tie_word_embeddings=False)
    model.model.layers[0].self_attn.k_proj.weight = nn.Parameter(model.model.layers[0].self_attn.v_proj.weight.data)
    with pytest.raises(RuntimeError, match="shared tensors"):
        saved_weights(model)
    assert_equal(streamed(model), model.state_dict())


def test_what_is_not_saved_is_not_sent() -> None:
    model = tiny_model("llama")
    model._keys_to_ignore_on_save = {"lm_head.weight"}
    assert "lm_head.weight" not in streamed(model)
    assert_equal(streamed(model), saved_weights(model))


def test_adapters_keep_their_names(mixtral: PreTrainedModel) -> None:
    peft = pytest.importorskip("peft")
    expected = saved_weights(mixtral)
    adapted = peft.get_peft_model(mixtral, peft.LoraConfig(target_modules=["q_proj"]))
    assert_equal(streamed(adapted), adapted.state_dict())
    merged = adapted.merge_and_unload()
    assert_equal(streamed(merged), expected)


def test_what_is_remembered_is_asked_again_when_conversions_change(mixtral: PreTrainedModel) -> None:
    manager = managed(mixtral)
    assert "model.norm.weight" in dict(manager.stream_weights())
    mixtral._weight_conversions = [WeightRenaming(r"^backbone\.", "model.")]  # type: ignore[assignment]
    found = dict(manager.stream_weights())
    assert "backbone.norm.weight" in found
    assert_equal(found, saved_weights(mixtral))
    manager.close()


def test_weights_on_device_have_the_names_of_checkpoints(mixtral: PreTrainedModel) -> None:
    expected = saved_weights(mixtral)
    manager = managed(mixtral)
    manager.offload("params", "buffers")
    kept = {}
    with manager.weights_on_device() as weights:
        assert len(weights) == len(expected)
        assert weights["model.norm.weight"] is mixtral.get_parameter("model.norm.weight")
        for name, tensor in weights.items():
            assert torch.equal(tensor, expected[name]), name
            if not isinstance(tensor, nn.Parameter):
                kept[name] = tensor
    assert not weights and manager.where("params").value == "host"
    assert len(kept) == 24
    assert_equal(kept, {name: expected[name] for name in kept})  # memory of their own
    with manager.weights_on_device(as_saved=False) as weights:
        assert set(weights) == set(mixtral.state_dict())
    manager.close()


def test_weights_on_device_refuse_a_shard_that_is_saved_in_another_shape(one_rank: None) -> None:
    model = tiny_model("mixtral")
    fully_shard(model)
    manager = managed(model)
    with pytest.raises(UnsupportedError, match=r"found 'model.*_proj' sharded or quantized.*use stream_weights\(\)"):
        manager.weights_on_device().__enter__()
    with manager.weights_on_device(as_saved=False) as weights:
        assert set(weights) == set(model.state_dict())
    manager.close()


def test_a_transformers_that_cannot_be_asked_is_named_once(
    mixtral: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(core_model_loading, "revert_weight_conversion")
    monkeypatch.setattr(transformers_private, "_said", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert_equal(streamed(mixtral), mixtral.state_dict())
    (said,) = [record.getMessage() for record in caplog.records if "core_model_loading" in record.getMessage()]
    assert "expected transformers to have core_model_loading.revert_weight_conversion" in said


class Written(ConversionOps):
    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any) -> Any:
        (tensor,) = next(iter(input_dict.values()))
        return {target_patterns[0]: self.change(tensor)}

    def change(self, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        copy[0] = 1
        return copy

    @property
    def reverse_op(self) -> ConversionOps:
        return self


class Counted(Written):
    def change(self, tensor: Tensor) -> Tensor:
        return tensor[: int(tensor.sum().item())]


class Padded(Written):
    def change(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor[[1, 0]] * 2, torch.zeros(3, *tensor.shape[1:], device=tensor.device)])


@pytest.mark.parametrize("operation", [Written, Counted])
def test_a_conversion_that_cannot_be_done_later_is_refused(operation: type[Written]) -> None:
    model = tiny_model("llama")
    model._weight_conversions = [WeightConverter("lm_head.weight", "lm_head.weight", operations=[operation()])]  # type: ignore
    with pytest.raises(UnsupportedError, match=r"how it saves LlamaForCausalLM, found .*Give as_saved=False"):
        streamed(model)
    assert_equal(streamed(model, as_saved=False), model.state_dict())


def test_a_conversion_that_computes() -> None:
    model = tiny_model("llama")
    model._weight_conversions = [WeightConverter("lm_head.weight", "lm_head.weight", operations=[Padded()])]  # type: ignore
    assert_equal(streamed(model), saved_weights(model))


def test_what_one_tensor_is_made_of_waits_and_counts() -> None:
    model = tiny_model("llama")
    both = ["self_attn.q_proj.weight", "self_attn.o_proj.weight"]
    model._weight_conversions = [WeightConverter("self_attn.qo.weight", both, operations=[Chunk(0)])]  # type: ignore
    expected = saved_weights(model)
    assert_equal(streamed(model), expected)
    manager = managed(model)
    one = model.get_parameter("model.layers.0.self_attn.q_proj.weight").nbytes
    stream = manager.stream_weights("1KiB", names=["model.layers.1.self_attn.qo.weight"])
    assert stream.ledger.limit_bytes == 2 * 1024 + 4 * one
    assert len(dict(stream)) == 1 and stream.ledger.peak_bytes >= 4 * one
    with manager.stream_weights("1KiB", names=[name for name in expected if "layers.1.self_attn" in name]) as stream:
        next(stream)
        assert stream.ledger.held_bytes >= one, "of q_proj, which waits for o_proj"
    assert stream.ledger.held_bytes == 0
    manager.close()


def test_tensor_subclasses_are_renamed_and_not_converted(mixtral: PreTrainedModel) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def double(name: str) -> nn.Parameter:
        value = mixtral.get_parameter(name).detach()
        return nn.Parameter(TwoTensor(value.clone(), value + 1))

    expected = saved_weights(mixtral)
    layer = mixtral.model.layers[0]
    layer.mlp.gate.weight = double("model.layers.0.mlp.gate.weight")
    gate = expected.pop("model.layers.0.block_sparse_moe.gate.weight")
    parts = {f"model.layers.0.block_sparse_moe.gate.weight.{name}": gate + n for n, name in enumerate("ab")}
    assert_equal(streamed(mixtral), expected | parts)
    with managed(mixtral).weights_on_device() as weights:
        assert weights["model.layers.0.block_sparse_moe.gate.weight"] is layer.mlp.gate.weight
    layer.mlp.experts.down_proj = double("model.layers.0.mlp.experts.down_proj")
    with pytest.raises(UnsupportedError, match=r"inside a tensor subclass.*Give as_saved=False"):
        streamed(mixtral)
    with pytest.raises(UnsupportedError, match="sharded or quantized"):
        managed(mixtral).weights_on_device().__enter__()
    assert "model.layers.0.mlp.experts.down_proj.a" in streamed(mixtral, as_saved=False)


def test_the_twin_of_a_model_is_not_kept(mixtral: PreTrainedModel) -> None:
    manager = managed(mixtral)
    stream = manager.stream_weights()
    assert dict(stream)
    manager.close()
    assert not [found for found in gc.get_objects() if type(found) is nn.Parameter and found.is_meta]
