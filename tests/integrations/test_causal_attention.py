"""attn_implementation="fxoffload_causal_sdpa" computes what transformers' sdpa does, with masks only where needed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    MistralConfig,
    ModernBertConfig,
    PreTrainedConfig,
    Qwen3Config,
    T5Config,
)

from fxoffload.integrations.causal_attention import causal_attention
from fxoffload.integrations.transformers import CAUSAL_ATTENTION, MaskDroppingCollator, drop_full_mask
from fxoffload.torch_private.dynamo_positions import are_consecutive

VOCABULARY, TOKENS = 97, 21
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BOTH_KINDS = ["sliding_attention", "full_attention"]
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**TINY),
    # 21 tokens: the first window, one or several whole blocks, and with 6 and 8 a last one that is not whole.
    "window 6": lambda: MistralConfig(**TINY, sliding_window=6),
    "window 7": lambda: MistralConfig(**TINY, sliding_window=7),
    "window 16": lambda: MistralConfig(**TINY, sliding_window=16),
    "window of the whole": lambda: MistralConfig(**TINY, sliding_window=TOKENS),
    "gemma3": lambda: Gemma3TextConfig(**TINY, sliding_window=8, layer_types=BOTH_KINDS, query_pre_attn_scalar=8),
}
AS_CAUSAL = ("qwen3", "window of the whole")


def quick(*names: str) -> list[Any]:
    """All configurations; but for ``names`` they take long together."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


def models(config: PreTrainedConfig, kind: Any = AutoModelForCausalLM) -> tuple[Any, Any]:
    """A model with transformers' sdpa, and the same with ours."""
    torch.manual_seed(0)
    theirs = kind.from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
    ours = kind.from_config(copy.deepcopy(config), attn_implementation=CAUSAL_ATTENTION).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def tokens(batch: int = 2, length: int = TOKENS) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def padded(side: str) -> Tensor:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, -5:] = 0
    return mask if side == "right" else mask.flip(-1)


def packed() -> Tensor:
    """Two sequences in each row."""
    return torch.cat([torch.arange(9), torch.arange(TOKENS - 9)])[None]


INPUTS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "no mask": dict,
    "full mask": lambda: {"attention_mask": torch.ones(2, TOKENS, dtype=torch.long)},
    "right padding": lambda: {"attention_mask": padded("right")},
    "left padding": lambda: {"attention_mask": padded("left")},
    "packed": lambda: {"position_ids": packed().expand(2, -1)},
    "consecutive": lambda: {"position_ids": torch.arange(TOKENS)[None]},
}


class Graphs:
    """A backend that keeps the graphs that it is given."""

    def __init__(self) -> None:
        self.all: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.all.append(graph)
        return graph.forward

    def num_masks(self, length: int = TOKENS) -> int:
        """Attention calls with a mask of S x S."""
        found = 0
        for node in (n for graph in self.all for n in graph.graph.nodes if n.target is ATTENTION):
            mask = node.kwargs.get("attn_mask")
            found += mask is not None and tuple(mask.meta["example_value"].shape[-2:]) == (length, length)
        return found


ATTENTION = torch.nn.functional.scaled_dot_product_attention


def compiled(model: nn.Module, **options: Any) -> tuple[Any, Graphs]:
    torch.compiler.reset()
    graphs = Graphs()
    return torch.compile(model, backend=graphs, fullgraph=True, **options), graphs


def close(found: Tensor, expected: Tensor, mask: Tensor | None) -> None:
    """Of real tokens: what padding computes means nothing."""
    if mask is not None:
        found, expected = found[mask.bool()], expected[mask.bool()]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow_except("window 6-right padding-False", "window 6-left padding-False")
@pytest.mark.parametrize("use_cache", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("config", quick("window 6"))
def test_results_are_those_of_sdpa(config: str, inputs: str, use_cache: bool) -> None:
    theirs, ours = models(CONFIGS[config]())
    given = {"input_ids": tokens(), "use_cache": use_cache, **INPUTS[inputs]()}
    mask = given.get("attention_mask")
    with torch.no_grad():
        expected = theirs(**given).logits
        eager = ours(**given).logits
        step, graphs = compiled(ours)
        found = step(**given).logits
    if config in AS_CAUSAL:
        assert torch.equal(eager, expected)  # the same kernel
    close(eager, expected, mask)
    close(found, expected, mask)
    if inputs == "no mask":
        assert graphs.num_masks() == 0
    elif inputs != "consecutive":
        # Packed sequences with a cache are not looked for, by transformers neither.
        assert (graphs.num_masks() > 0) == (inputs != "packed" or not use_cache)


@pytest.mark.slow
@pytest.mark.parametrize("config", quick("qwen3"))
def test_gradients_are_those_of_sdpa_with_varying_lengths(config: str) -> None:
    theirs, ours = models(CONFIGS[config]())
    step, graphs = compiled(ours, dynamic=True)
    for length in (TOKENS, 15, 34):
        for model, call in ((theirs, theirs), (ours, step)):
            model.zero_grad()
            ids = tokens(2, length)
            call(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for (name, expected), (_, found) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
            torch.testing.assert_close(
                found.grad, expected.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert all(graphs.num_masks(length) == 0 for length in (TOKENS, 15, 34))


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("config", quick("gemma3"))
def test_generation_takes_the_same_tokens(config: str, cache: str | None) -> None:
    theirs, ours = models(CONFIGS[config]())
    for mask in (torch.ones(2, TOKENS, dtype=torch.long), padded("left")):
        settings = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
        expected = theirs.generate(tokens(), attention_mask=mask, **settings)
        assert torch.equal(ours.generate(tokens(), attention_mask=mask, **settings), expected)


@pytest.mark.slow
@pytest.mark.parametrize("config", quick("window 6"))
def test_a_prompt_in_pieces_computes_what_the_whole_does(config: str) -> None:
    _, ours = models(CONFIGS[config]())
    with torch.no_grad():
        whole = ours(tokens(), use_cache=True).logits
        first = ours(tokens()[:, :9], use_cache=True)
        step, _ = compiled(ours)
        second = step(input_ids=tokens()[:, 9:], past_key_values=first.past_key_values, use_cache=True)
    close(torch.cat([first.logits, second.logits], 1), whole, None)


@pytest.mark.slow
def test_chunked_attention_has_its_mask() -> None:
    config = Llama4TextConfig(
        **TINY, attention_chunk_size=8, intermediate_size_mlp=64, num_local_experts=2, interleave_moe_layer_step=4
    )
    theirs, ours = models(config)
    with torch.no_grad():
        step, _ = compiled(ours)
        expected = theirs(tokens(), use_cache=False).logits
        close(step(input_ids=tokens(), use_cache=False).logits, expected, None)


@pytest.mark.slow_except("False-ModernBertConfig")
@pytest.mark.parametrize("config", [BertConfig, ModernBertConfig])
@pytest.mark.parametrize("masked", [False, True])
def test_encoders_see_both_ways(config: Any, masked: bool) -> None:
    sizes = {k: v for k, v in TINY.items() if k not in ("num_key_value_heads", "head_dim")}
    theirs, ours = models(config(**sizes), AutoModel)
    given = {"input_ids": tokens(), **({"attention_mask": padded("right")} if masked else {})}
    with torch.no_grad():
        step, graphs = compiled(ours)
        expected, found = theirs(**given).last_hidden_state, step(**given).last_hidden_state
    close(found, expected, given.get("attention_mask"))
    if config is BertConfig and not masked:
        assert graphs.num_masks() == 0


SEQ2SEQ: dict[str, Callable[[], PreTrainedConfig]] = {
    "bart": lambda: BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
    ),
    "t5": lambda: T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", ["bart", pytest.param("t5", marks=pytest.mark.slow)])
def test_cross_attention_is_that_of_sdpa(config: str, masked: bool) -> None:
    theirs, ours = models(SEQ2SEQ[config](), AutoModelForSeq2SeqLM)
    given = {"input_ids": tokens(), "decoder_input_ids": tokens(2, 13), "use_cache": False}
    if masked:
        given["attention_mask"] = padded("right")
    with torch.no_grad():
        expected = theirs(**given).logits
        step, _ = compiled(ours)
        close(ours(**given).logits, expected, None)
        close(step(**given).logits, expected, None)


def test_what_sdpa_lacks_is_refused_with_what_to_do() -> None:
    sizes = {**TINY, "num_local_experts": 2, "num_experts_per_tok": 1}
    with pytest.raises(ValueError, match="does not support an attention implementation through"):
        AutoModelForCausalLM.from_config(GptOssConfig(**sizes), attn_implementation=CAUSAL_ATTENTION)
    # transformers' SDPA leaves a cap of the scores out; later versions than 5.20 refuse Gemma-2 here.
    with pytest.raises(ValueError, match=r"does not support an attention implementation through|found softcap from"):
        AutoModelForCausalLM.from_config(Gemma2Config(**TINY), attn_implementation=CAUSAL_ATTENTION)(tokens())
    q = torch.ones(1, 2, 4, 8)
    for name in ("s_aux", "softcap", "block_indices"):
        with pytest.raises(ValueError, match=f"found {name} from Module; use the default attn_implementation"):
            causal_attention(nn.Module(), q, q, q, None, **{name: torch.ones(2)})
    with pytest.raises(ValueError, match=r"expected as many queries as keys .* found 2 and 4"):
        causal_attention(nn.Module(), q[:, :, :2], q, q, None)
    with pytest.raises(ValueError, match="without a position bias"):
        causal_attention(nn.Module(), q, q, q, torch.ones(1, 1, 2, 4, dtype=torch.bool), position_bias=torch.ones(1))


def test_dropout_is_that_of_sdpa() -> None:
    theirs, ours = models(Qwen3Config(**TINY, attention_dropout=0.5))
    outputs = []
    for model in (theirs, ours):
        torch.manual_seed(3)
        outputs.append(model.train()(tokens(), use_cache=False).logits)
    assert torch.equal(*outputs)


def plus(n: int) -> Callable[[int], Tensor]:
    return lambda size: (torch.arange(size) + n).unsqueeze(0).expand(2, -1)


def written(size: int) -> Tensor:
    positions = torch.arange(size)
    positions.view(1, -1)[:, 2:] = 0
    return positions


POSITIONS: dict[str, tuple[Callable[[int], Tensor], bool]] = {
    "arange": (torch.arange, True),
    "from a number": (lambda size: torch.arange(4, 4 + size), True),
    "plus a number": (plus(3), True),
    "one of three": (lambda size: torch.arange(size).view(1, 1, -1).expand(3, 2, -1)[0], True),
    "every second": (lambda size: torch.arange(0, 2 * size, 2), False),
    "twice": (lambda size: torch.arange(size).repeat(2), False),
    "a column": (lambda size: torch.arange(size)[None].expand(size, -1)[:, 0], False),
    "plus other positions": (lambda size: torch.arange(size) + torch.arange(size), False),
    "counting down": (lambda size: 9 - torch.arange(size), False),
    "written to": (written, False),
    "rounded": (lambda size: torch.arange(size, dtype=torch.bfloat16), False),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", POSITIONS)
def test_positions_count_up_where_the_graph_says_so(name: str, dynamic: bool) -> None:
    make, expected = POSITIONS[name]
    found = []

    def function(x: Tensor) -> Tensor:
        positions = make(x.shape[0])
        found.append(are_consecutive(positions))
        return x + positions.sum()

    torch.compiler.reset()
    torch.compile(function, backend="eager", fullgraph=True, dynamic=dynamic)(torch.ones(12))
    assert found == [expected]


def test_positions_that_are_an_input_are_not_known() -> None:
    def function(positions: Tensor) -> tuple[Tensor, bool]:
        return positions + 1, are_consecutive(positions)

    torch.compiler.reset()
    assert not torch.compile(function, backend="eager", fullgraph=True)(torch.arange(5))[1]
    assert not are_consecutive(torch.arange(5))


@pytest.mark.parametrize(
    "mask, right_padding, dropped",
    [
        (torch.ones(2, 4), False, True),
        (padded("right"), False, False),
        (padded("right"), True, True),
        (padded("left"), True, False),
        (torch.tensor([[1, 0, 1]]), True, False),
        (torch.tensor([[0, 0], [1, 0]]), True, False),
        (torch.ones(1, 1, 4, 4), False, False),
    ],
)
def test_a_mask_that_masks_nothing_is_dropped(mask: Tensor, right_padding: bool, dropped: bool) -> None:
    batch = {"input_ids": tokens(), "attention_mask": mask}
    assert ("attention_mask" in drop_full_mask(batch, right_padding=right_padding)) != dropped
    collator = MaskDroppingCollator(lambda rows: rows, right_padding=right_padding)
    assert ("attention_mask" in collator(batch)) != dropped
    assert "attention_mask" in batch


def test_right_padding_does_not_change_the_loss() -> None:
    _, ours = models(CONFIGS["window 6"]())
    mask = padded("right")
    batch = {"input_ids": tokens(), "attention_mask": mask, "labels": tokens().masked_fill(mask == 0, -100)}
    with torch.no_grad():
        torch.testing.assert_close(ours(**drop_full_mask(batch, right_padding=True)).loss, ours(**batch).loss)
