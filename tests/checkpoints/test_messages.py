"""Errors name the folder or file, and say what to do."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fxoffload import checkpoints
from fxoffload.checkpoints import BrokenCheckpointError, CheckpointError, DestinationError, UnsupportedCheckpointError
from fxoffload.checkpoints import errors as errors_module
from tests.checkpoints.making import make
from tests.checkpoints.test_index import INDEX, rewrite_index

PACKAGE = Path(errors_module.__file__).parent

DOWNLOAD = r"fetch it first and give that folder: hf download {0}/{1} --local-dir {1} .*huggingface-cli download"


@pytest.mark.parametrize(
    ("source", "owner", "name"),
    [
        ("Qwen/Qwen3-30B-A3B", "Qwen", "Qwen3-30B-A3B"),
        ("Qwen/Qwen3-30B-A3B/", "Qwen", "Qwen3-30B-A3B"),
        ("deepseek-ai/DeepSeek-V3.2", "deepseek-ai", "DeepSeek-V3.2"),
        ("https://huggingface.co/zai-org/GLM-4.5", "zai-org", "GLM-4.5"),
        ("https://huggingface.co/zai-org/GLM-4.5/tree/main", "zai-org", "GLM-4.5"),
        ("hf://openai/gpt-oss-20b", "openai", "gpt-oss-20b"),
        ("huggingface.co/openai/gpt-oss-20b", "openai", "gpt-oss-20b"),
    ],
)
def test_a_name_of_the_hub_gets_the_command_that_fetches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, owner: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    words = "expected a checkpoint folder, found nothing at .*" + DOWNLOAD.format(owner, re.escape(name))
    for call in (
        lambda: checkpoints.inspect(source),
        lambda: checkpoints.merge(source, "target"),
        lambda: checkpoints.verify(make(tmp_path / "there"), source),
    ):
        with pytest.raises(CheckpointError, match=words):
            call()


@pytest.mark.parametrize("source", ["./models/qwen", "/nonexistent/models/qwen", "qwen", "a/b/c", "../a/b"])
def test_what_is_no_name_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    (tmp_path / "here" / "models").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(
        CheckpointError, match=r"found nothing at .*; look for a mistake in the name, or fetch"
    ) as caught:
        checkpoints.inspect(source)
    assert os.path.normpath(source) in str(caught.value)


def cache_of_the_hub(folder: Path) -> None:
    make(folder / "snapshots" / "0a1b")


def below(folder: Path) -> None:
    make(folder / "checkpoint-500")


@pytest.mark.parametrize(
    ("lay", "error", "words"),
    [
        (Path.mkdir, BrokenCheckpointError, "neither, but an empty folder; give the folder that has one, or fetch it"),
        (cache_of_the_hub, BrokenCheckpointError, "checkpoints in snapshots/0a1b; give one of these folders"),
        (below, BrokenCheckpointError, "checkpoints in checkpoint-500; give one of these folders"),
        ({"README.md"}, BrokenCheckpointError, "neither, but only README.md; give"),
        ({"x.gguf"}, UnsupportedCheckpointError, "found GGUF: x.gguf, weights .*; fetch the checkpoint that they were"),
        (
            {"pytorch_model.bin"},
            UnsupportedCheckpointError,
            "pickled weights: pytorch_model.bin.*write safetensors first",
        ),
        ({"consolidated.00.pth"}, UnsupportedCheckpointError, "pickled weights: consolidated.00.pth. Loading"),
        ({"training_args.bin", "a"}, BrokenCheckpointError, "neither, but only a, training_args.bin"),
        ({"a.safetensors"}, BrokenCheckpointError, "1 files without an index: a.safetensors; give"),
    ],
)
def test_a_folder_that_is_no_checkpoint(
    tmp_path: Path, lay: set[str] | Callable[[Path], None], error: type[Exception], words: str
) -> None:
    folder = tmp_path / "folder"
    if isinstance(lay, set):
        folder.mkdir()
        for name in lay:
            (folder / name).touch()
    else:
        lay(folder)
    with pytest.raises(error, match=re.escape(f"{folder}: ") + f".*{words}"):
        checkpoints.inspect(folder)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("model.safetensors", CheckpointError, "a file of one at {0}; give its folder: {1}"),
        (INDEX, CheckpointError, "a file of one at {0}; give its folder: {1}"),
        ("config.json", CheckpointError, "a file of one at {0}; give its folder: {1}"),
        ("model-Q4_K_M.gguf", UnsupportedCheckpointError, "a GGUF file at {0}, .*give their folder"),
        ("pytorch_model.bin", UnsupportedCheckpointError, "a file of pickled weights at {0}; write safetensors first"),
        ("optimizer.pt", CheckpointError, "a file at {0}; give the folder of a checkpoint"),
        ("archive.tar", CheckpointError, "a file at {0}; give the folder of a checkpoint"),
        ("link", CheckpointError, "a link that leads nowhere at {0}; fetch the checkpoint again"),
        ("pipe", CheckpointError, "a file at {0}; give the folder"),
    ],
)
def test_a_file_in_place_of_a_folder(tmp_path: Path, name: str, error: type[Exception], words: str) -> None:
    path = tmp_path / name
    if name == "link":
        path.symlink_to("nowhere")
    elif name == "pipe":
        os.mkfifo(path)
    else:
        path.touch()
    with pytest.raises(error, match=f"expected a checkpoint folder, found {words.format(path, tmp_path)}"):
        checkpoints.inspect(path)


CALLS: list[Callable[[Any], object]] = [
    checkpoints.inspect,
    lambda source: checkpoints.merge(source, "target"),
    lambda source: checkpoints.convert(source, "target", "fused"),
    lambda source: checkpoints.verify(source, "target"),
]


@pytest.mark.parametrize("call", CALLS)
def test_an_empty_name(call: Callable[[Any], object]) -> None:
    """The current folder, which pathlib takes it for, is not named."""
    with pytest.raises(CheckpointError, match=r"^expected a checkpoint folder, found an empty name; name the folder$"):
        call("")


def test_an_address_is_shown_as_it_was_given() -> None:
    with pytest.raises(CheckpointError, match=r"^expected a .* found nothing at https://huggingface.co/a/b; if that"):
        checkpoints.inspect("https://huggingface.co/a/b")


@pytest.mark.parametrize("name", ["a\0b", "\0", "a\ud800"])
def test_what_no_file_can_be_called(tmp_path: Path, name: str) -> None:
    words = f"found {re.escape(repr(name))}, whose characters no name of a file can have; give a name without them"
    for call in CALLS:
        with pytest.raises(CheckpointError, match=rf"^expected a checkpoint folder, {words}"):
            call(name)
    source = make(tmp_path / "source")
    for target in (name, f"{tmp_path}/{name}", f"{tmp_path}/{name}/target"):
        with pytest.raises(DestinationError, match=r"^expected a folder to write into, found '.*whose characters"):
            checkpoints.merge(source, target)
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("value", [b"folder", None, 3, ["folder"]])
def test_what_is_no_name(tmp_path: Path, value: Any) -> None:
    words = rf"as a str or a pathlib.Path, found {re.escape(repr(value))}; give one of these$"
    for call in CALLS:
        with pytest.raises(TypeError, match=rf"^expected a checkpoint folder {words}"):
            call(value)
    with pytest.raises(TypeError, match=rf"^expected a folder to write into {words}"):
        checkpoints.merge(make(tmp_path / "source"), value)


def test_an_index_that_lies(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    rewrite_index(source, lambda index: index["weight_map"].popitem())
    words = (
        rf"^{source}/model-0000\d-of-00003.safetensors: expected the tensors that {INDEX} lists for it, but the index "
    )
    with pytest.raises(BrokenCheckpointError, match=words + r"lies: in it but .*; fetch both again, from one revision"):
        checkpoints.inspect(source)


def raised() -> Iterator[tuple[str, str]]:
    """Every error that the package makes: where, and the text of its message without filled-in values."""
    for path in sorted(PACKAGE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "").endswith("Error") and node.args:
                pieces = getattr(node.args[0], "values", [node.args[0]])
                texts = [str(piece.value) if isinstance(piece, ast.Constant) else "..." for piece in pieces]
                if hasattr(errors_module, getattr(node.func, "id", "")):
                    yield f"{path.name}:{node.lineno}", "".join(texts)


ADVICE = re.compile(
    r"(?:[;:.,] (?:or )?|and )(?:fetch|mend|remove|write|convert|use|give|move|make|describe|ask|name|look|check|wait|"
    r"go|keep|leave|stack|mount|replace|rename|do not use)\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize(("where", "text"), [pytest.param(*pair, id=pair[0]) for pair in raised()])
def test_every_message_says_what_to_do(where: str, text: str) -> None:
    assert ADVICE.search(text), text


def test_there_are_messages() -> None:
    assert len(list(raised())) > 60


@pytest.mark.parametrize("name", ["a", "expected", ".", "./a/", "../here/a"])
def test_a_folder_is_named_whatever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also where a word of the message is its name."""
    (tmp_path / "here").mkdir()
    source = make(tmp_path / "here" / ("expected" if name == "expected" else "a"))
    monkeypatch.chdir(source if name == "." else source.parent)
    (source / "config.json").write_text('{"model_type": "qwen3_moe", "num_experts": "4"}')
    shown = str(source) if name == "." else name
    with pytest.raises(BrokenCheckpointError, match=rf"^{re.escape(shown)}: config.json: expected num_experts"):
        checkpoints.inspect(name)
    (source / "config.json").write_text("[]")
    inside = "a" if name == "./a/" else shown
    with pytest.raises(BrokenCheckpointError, match=rf"^{re.escape(inside)}(: |/)config.json: expected a JSON object"):
        checkpoints.inspect(name)
