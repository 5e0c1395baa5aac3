"""What values are called: by module, shape and dtype, and by op and node where there is no module."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fxoffload.analysis.value_names import INPUT_NAME, ValueNames
from fxoffload.torch_private.aot_autograd import name_of_input


class Gated(nn.Module):
    """A product alone in its module, and three ops in that of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.proj(x)
        return (torch.sin(torch.sin(up)) * up).view(-1).to(torch.bfloat16)


def names(*, modules: bool) -> dict[str, str]:
    block = Gated()
    gm = make_fx(block, record_module_stack=True)(torch.ones(2, 4))
    for node in gm.graph.nodes:
        path = "layers.3.proj" if "mm" in node.name or node.target is torch.ops.aten.t.default else "layers.3"
        if modules and node.op == "call_function":
            node.meta["nn_module_stack"] = {"a": ("L['self'].layers[3]", Gated), "b": (f"L['self'].{path}", nn.Linear)}
    found = ValueNames(gm.graph)
    return {node.name: found.of(node) for node in gm.graph.nodes if node.op != "output"}


def test_by_module_shape_and_dtype() -> None:
    found = names(modules=True)
    assert found["mm"] == "layers.3.proj [2, 8] f32"
    assert (found["sin"], found["sin_1"]) == ("layers.3 (sin 1) [2, 8] f32", "layers.3 (sin 2) [2, 8] f32")
    assert found["mul"] == "layers.3 (mul) [2, 8] f32"
    assert found["view"] == "layers.3 (mul) [16] f32", "a view is its memory, in its own shape"
    assert found["_to_copy"] == "layers.3 (to_copy) [16] bf16"


def test_by_op_and_node_where_there_is_no_module() -> None:
    found = names(modules=False)
    assert found["mm"] == "aten.mm mm [2, 8] f32" and found["sin_1"] == "aten.sin sin_1 [2, 8] f32"
    assert [text for text in found.values() if text.startswith("input ")] == [f"input {next(iter(found))} [2, 4] f32"]


def test_a_value_of_no_module_is_named_after_the_module_that_it_comes_from() -> None:
    gm = make_fx(lambda x: torch.sin(torch.sin(x)).amax())(torch.ones(2, 4))
    first = next(node for node in gm.graph.nodes if node.op == "call_function")
    first.meta["nn_module_stack"] = {"a": ("L['self'].lm_head", nn.Linear)}
    named = {node.name: ValueNames(gm.graph).of(node) for node in gm.graph.nodes if node.op == "call_function"}
    assert named["amax"] == "from lm_head (amax) [] f32" and named["sin"] == "lm_head [2, 4] f32"


def test_an_input_is_called_as_the_user_calls_it() -> None:
    gm = make_fx(lambda x: torch.sin(x))(torch.ones(2, 4))
    given, computed = list(gm.graph.nodes)[:2]
    given.meta[INPUT_NAME] = "input_ids"
    names = ValueNames(gm.graph)
    assert names.of(given) == "input input_ids [2, 4] f32" and names.of(computed) == "from input_ids (sin) [2, 4] f32"


@pytest.mark.parametrize(
    ("source", "name"),
    [("L['kwargs']['input_ids']", "input_ids"), ("L['batch']['input-ids']", "input-ids"), ("L['args'][0]", "args[0]")],
)
def test_what_the_user_calls_an_input(source: str, name: str) -> None:
    node = fx.Graph().placeholder("x")
    node.meta["grapharg"] = SimpleNamespace(source=SimpleNamespace(name=source))
    assert name_of_input(node) == name
