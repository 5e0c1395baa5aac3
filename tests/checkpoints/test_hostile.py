"""A checkpoint may come from anybody: whatever its JSON says, the answer is quick, and one of our errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fxoffload import checkpoints
from fxoffload.checkpoints import BrokenCheckpointError, CheckpointError, DestinationError
from fxoffload.checkpoints import index as index_module
from fxoffload.checkpoints.errors import shortened, some
from fxoffload.checkpoints.header import build_header, read_header
from fxoffload.checkpoints.index import DEEPEST
from fxoffload.checkpoints.read_json import MOST_LEVELS, MOST_MARKS
from fxoffload.cli.moe_tables import printable
from tests.checkpoints.making import make
from tests.checkpoints.test_index import FIRST, INDEX
from tests.marks import examples

CONFIG = "config.json"
NAME = "model.layers.0.mlp.gate.weight"
HUGE = 300_000


def read(folder: Path, file: str) -> bytes:
    data = (folder / file).read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")] if file == FIRST else data


def write(folder: Path, file: str, text: bytes) -> None:
    """A header in place of the shard's, or the whole file."""
    if file == FIRST:
        data = (folder / file).read_bytes()
        text = len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]
    (folder / file).write_bytes(text)


def with_entry(file: str, text: str) -> Callable[[bytes], bytes]:
    """Put ``text`` first in the object, or in the index's weight_map."""

    def change(before: bytes) -> bytes:
        place = before.index(b'"weight_map": {') + 15 if file == INDEX else 1
        return before[:place] + text.encode() + b"," + before[place:]

    return change


def deep(levels: int, text: str = "") -> str:
    return f'"deep": {"[" * levels}{text}{"]" * levels}'


def tensor(shape: str, offsets: str = "[0,0]", dtype: str = '"F32"') -> str:
    return f'"hostile": {{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}}}'


HOSTILE = {
    **{
        f"{what} in {file}": (file, with_entry(file, text), words)
        for file in (FIRST, INDEX, CONFIG)
        for what, text, words in (
            ("100,000 lists", deep(100_000), "expected JSON, found something else"),
            ("100,000 objects", '"deep": ' + '{"a":' * 100_000 + "1" + "}" * 100_000, "expected JSON"),
            ("more levels than writers take", deep(MOST_LEVELS + 1), f"more than {MOST_LEVELS} lists and objects"),
            ("a surrogate as a name", r'"\ud800": "x"', r"'\\ud800' is no valid Unicode"),
            ("a surrogate as a value", r'"x": "a\uDFFFb"', r"'a\\udfffb' is no valid Unicode"),
            ("a surrogate far in", deep(3, r'{"\udc00": 1}'), r"'\\udc00' is no valid Unicode"),
            ("a name twice", '"x": "1", "x": "2"', "'x' is there twice"),
            ("a name twice far in", deep(2, '{"x": 1, "x": 1}'), "'x' is there twice"),
            ("a number of a million digits", '"x": ' + "1" * 1_000_000, "expected JSON"),
        )
    },
    **{
        f"{what} in {file}": (file, with_entry(file, text), words)
        for file in (FIRST, INDEX)
        for what, text, words in (
            ("NaN", '"x": NaN', "NaN is no number"),
            ("Infinity", '"x": -Infinity', "-Infinity is no number"),
            ("a number beyond all", '"x": 1e999', "'1e999' is no finite number"),
            ("a name of a terminal", '"\\u001b]0;x": 1', "expected"),
            ("a name of a million letters", f'"{"x" * 1_000_000}": "{FIRST}"', "expected"),
        )
    },
    **{
        what: (FIRST, with_entry(FIRST, text), words)
        for what, text, words in (
            ("300,000 dimensions", tensor(f"[{','.join(['9'] * HUGE)}]"), "expected shape of hostile to be at most 32"),
            ("dimensions whose product overflows", tensor(f"[{','.join([str(2**62)] * 32)}]"), r"expected \d+ bytes"),
            ("a dimension of 2**63", tensor(f"[{2**63}, 0]"), r"whole numbers below 2\*\*63, found \[9223"),
            ("a negative dimension", tensor("[-1]"), r"found \[-1\]"),
            ("two negative dimensions", tensor("[-2, -3]", "[0,24]"), r"found \[-2, -3\]"),
            ("a dimension that is no integer", tensor("[1.0]", "[0,4]"), r"found \[1.0\]"),
            ("a dimension that is a truth", tensor("[true]", "[0,4]"), r"found \[True\]"),
            ("a dimension that is NaN", tensor("[NaN]"), "NaN is no number"),
            ("a shape that is a number", tensor("3"), "expected shape of hostile .* found 3"),
            ("one offset", tensor("[0]", "[0]"), r"data_offsets of hostile to be 2 whole numbers .* found \[0\]"),
            ("300,000 offsets", tensor("[0]", f"[{','.join(['9'] * HUGE)}]"), "data_offsets of hostile to be 2"),
            ("offsets that are texts", tensor("[0]", '["0", "0"]'), r"data_offsets of hostile .* found \['0', '0'\]"),
            ("offsets backwards", tensor("[1]", "[4, 0]"), "expected 4 bytes, found -4"),
            ("a dtype that is a list", tensor("[0]", dtype='["F32"]'), r"the dtypes BOOL.*found \['F32'\]"),
            ("a dtype of a million letters", tensor("[0]", dtype=f'"{"x" * 1_000_000}"'), "the dtypes BOOL"),
            (
                "an entry that is a text",
                '"hostile": "x"',
                "expected dtype, shape and data_offsets of hostile, found 'x'",
            ),
            ("an entry that lacks its shape", '"hostile": {"dtype": "F32"}', "expected dtype, shape and data_offsets"),
            ("100,000 tensors", ",".join(f'"{n}":0' for n in range(100_000)), "expected dtype, shape and data_offsets"),
        )
    },
    "a header that is a list": (FIRST, lambda text: b"[1]", "expected a JSON object, found list"),
    "a header in UTF-16": (FIRST, lambda text: text.decode().encode("utf-16"), "expected JSON"),
    "a header in Latin-1": (FIRST, lambda text: text.replace(b"mlp", b"\xe9"), "expected JSON"),
    "surrogates as bytes": (FIRST, lambda text: text.replace(b"mlp", b"\xed\xa0\x80"), "expected JSON"),
    "a header with a byte order mark": (FIRST, lambda text: b"\xef\xbb\xbf" + text, "expected JSON"),
    "a count beyond a layer's": (CONFIG, lambda text: text.replace(b'"num_experts": 4', b'"num_experts": NaN'), "nan"),
    "a model type of a million letters": (
        CONFIG,
        lambda text: text.replace(b"qwen3_moe", b"x" * 1_000_000),
        "expected config.json to have one of the model types",
    ),
    **{
        f"a shard's name {name!r}": (INDEX, lambda text, name=name: text.replace(FIRST.encode(), name), words)
        for name, words in (
            (rb"\ud800.safetensors", "no valid Unicode"),
            (rb"a\u0000b", "expected names that can be printed"),
            (rb"a\nb", "expected names that can be printed"),
            (b"..", "expected names of files in the same folder"),
            (b".", "expected names of files in the same folder"),
            (b"", "expected names of files in the same folder"),
            (b"/etc/passwd", "expected names of files in the same folder"),
            (b"x" * 999, "cannot be read .File name too long."),
            (b"x" * 1001, "expected names that can be printed, of at most 1000 characters"),
        )
    },
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_hostile_is_refused_quickly(tmp_path: Path, what: str) -> None:
    source = make(tmp_path / "source")
    file, change, words = HOSTILE[what]
    write(source, file, change(read(source, file)))
    begun = time.process_time()
    with pytest.raises(CheckpointError, match=words) as caught:
        checkpoints.inspect(source)
    assert time.process_time() - begun < 1
    message = str(caught.value)
    assert str(source) in message and (file in message or "File name too long" in message)
    assert len(message) < 3000 and printable(message) == message


def test_what_is_odd_but_valid_is_read(tmp_path: Path) -> None:
    """Infinity in a config, as transformers writes it; characters beyond 16 bits, escaped as a pair."""
    source = make(tmp_path / "source")
    write(
        source,
        CONFIG,
        with_entry(CONFIG, '"limit": [0.0, Infinity], "\\ud83d\\ude00": "\\ud83d\\ude00"')(read(source, CONFIG)),
    )
    write(source, FIRST, read(source, FIRST).replace(b'"format":"pt"', b'"format":"pt","\\ud83d\\ude00":"a\\nb"'))
    text = read(source, INDEX)
    write(source, INDEX, text.replace(b'"metadata": {', b'"metadata": {' + deep(MOST_LEVELS - 5).encode() + b","))
    checkpoints.merge(source, tmp_path / "target", verify=True, shard_size=300)


def test_a_replaced_checkpoint_may_be_hostile(tmp_path: Path) -> None:
    source, target = make(tmp_path / "source"), make(tmp_path / "target")
    write(target, INDEX, b"[" * 100_000)
    checkpoints.merge(source, target, overwrite=True, verify=True)


def test_an_extra_file_may_be_hostile(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    (source / "mtp.safetensors").write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    assert "it cannot be read" in checkpoints.inspect(source).foreign_weights["mtp.safetensors"]
    (source / "x.safetensors.index.json").write_bytes(b"[" * 100_000)
    with pytest.raises(BrokenCheckpointError, match=r"x.safetensors.index.json: expected JSON"):
        checkpoints.inspect(source)


def test_more_json_than_any_checkpoint_has(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    os.truncate(source / CONFIG, 1 << 40)
    with pytest.raises(BrokenCheckpointError, match=r"config.json: expected at most 100000000 bytes of JSON"):
        checkpoints.inspect(source)


@pytest.mark.parametrize("value", ["[]", "{}", "1.5", '{"":0}'])
@pytest.mark.parametrize("file", [FIRST, INDEX, CONFIG])
def test_millions_of_values_are_refused_before_they_are_read(tmp_path: Path, file: str, value: str) -> None:
    source = make(tmp_path / "source")
    text = read(source, file)
    write(source, file, text[:1] + f'"a": [{f"{value}," * MOST_MARKS}1],'.encode() + text[1:])
    begun = time.process_time()
    with pytest.raises(
        BrokenCheckpointError, match=rf"{file}: expected at most {MOST_MARKS} brackets and commas, found [2-8]\d{{6}};"
    ):
        checkpoints.inspect(source)
    assert time.process_time() - begun < 0.5


@pytest.mark.slow
def test_a_header_of_many_tensors_is_read(tmp_path: Path) -> None:
    names = [f"model.layers.0.mlp.experts.{number}.up_proj.weight" for number in range(100_000)]
    (tmp_path / "a.safetensors").write_bytes(build_header([(name, "F32", (0, 8)) for name in names], {}))
    assert len(read_header(tmp_path / "a.safetensors")[0]) == 100_000


def nest(folder: Path, levels: int) -> None:
    """Folders in each other, a file in the last. Their path may be longer than the kernel takes."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("file", os.O_CREAT, dir_fd=here))
    os.close(here)


@pytest.mark.parametrize("levels", [DEEPEST + 1, 1200])
def test_folders_deeper_than_any_checkpoint_has(tmp_path: Path, levels: int) -> None:
    source = make(tmp_path / "source")
    nest(source, levels)
    begun = time.process_time()
    deep = f"{source}{'/d' * (DEEPEST + 1)}"
    with pytest.raises(
        BrokenCheckpointError, match=rf"^{deep}: expected at most {DEEPEST} folders in each other, found more; remove"
    ):
        checkpoints.inspect(source)
    assert time.process_time() - begun < 1
    # pytest removes old folders by recursion, and would not come to the end of this one.
    subprocess.run(["rm", "-r", source / "d"], check=True)


def test_folders_as_deep_as_may_be(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    nest(source, DEEPEST)
    checkpoints.merge(source, tmp_path / "target", verify=True)
    assert (tmp_path / "target" / ("d/" * DEEPEST) / "file").is_file()


def test_a_replaced_checkpoint_may_be_deep(tmp_path: Path) -> None:
    source, target = make(tmp_path / "source"), make(tmp_path / "target")
    nest(target, 1200)
    with pytest.raises(DestinationError, match=rf"expected at most {DEEPEST} folders .*; remove {target} yourself"):
        checkpoints.merge(source, target, overwrite=True)
    subprocess.run(["rm", "-r", target / "d"], check=True)


def test_links_that_multiply_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two links in each of twenty folders to the next are a million ways."""
    source = make(tmp_path / "source")
    for level in range(20):
        (tmp_path / str(level)).mkdir()
        for name in "ab":
            (tmp_path / str(level) / name).symlink_to(tmp_path / str(level + 1))
    (tmp_path / "20").mkdir()
    (source / "first").symlink_to(tmp_path / "0")
    monkeypatch.setattr(index_module, "MOST_FOLDERS", 1000)
    with pytest.raises(BrokenCheckpointError, match=rf"^{source}: expected at most 1000 folders below it, found more"):
        checkpoints.inspect(source)


@pytest.mark.parametrize("place", ["..", "/", ".", "assets", "../beside"])
def test_a_link_to_a_folder_around_it(tmp_path: Path, place: str) -> None:
    """Found at once, without a walk through the folders around the checkpoint."""
    source = make(tmp_path / "source")
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "back").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to("nowhere")
    (source / "assets" / "loop").symlink_to(os.path.normpath(source / place))
    with pytest.raises(BrokenCheckpointError, match=rf"^{source}/assets/loop(/back)?: a link to a folder around it;"):
        checkpoints.inspect(source)


def test_more_experts_than_any_model_has(tmp_path: Path) -> None:
    """Without features they take no bytes, whatever their number."""
    source = tmp_path / "source"
    source.mkdir()
    shape = [1 << 60, 0, 0]
    names = [f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate", "up", "down")]
    header = json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name in names}).encode()
    (source / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (source / CONFIG).write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(
        BrokenCheckpointError, match=r"source: model.layers.0.*expected at most 100000 experts, found 1152"
    ):
        checkpoints.split(source, tmp_path / "target")


def test_names_of_files_may_be_any_bytes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = make(tmp_path / "source")
    odd = [os.fsdecode(name) for name in (b"\xff.bin", b"\x1b]0;x\x07.bin", b"a\nb.bin")]
    for name in odd:
        (source / name).touch()
    done = checkpoints.merge(source, tmp_path / "target", verify=True)
    assert set(odd) <= set(checkpoints.inspect(tmp_path / "target").foreign_weights)
    "\n".join(done.notes).encode()
    assert all(printable(note) == note for note in done.notes)


def test_messages_stay_short() -> None:
    assert len(some(["x" * 10_000] * 9)) < 1200
    assert some(["a", "b\n"]) == "a, 'b\\n'"
    assert len(shortened(["x"] * 10_000)) == 203


# -- a fuzzer ----------------------------------------------------------------------------------------------------------

OF_CONFIGS = st.sampled_from(
    [
        *("model_type", "num_experts", "num_local_experts", "num_hidden_layers", "hidden_size", "mlp_layer_types"),
        *("mlp_only_layers", "decoder_sparse_step", "text_config", "vision_config", "quantization_config"),
    ]
)
WORDS = st.sampled_from(
    [
        *("__metadata__", "dtype", "shape", "data_offsets", "F32", "BF16", "F8_E4M3", "metadata", "weight_map", FIRST),
        *("total_size", "..", "", NAME, "model.layers.0.mlp.experts.gate_up_proj", "qwen3_omni_moe", "deepseek_v3"),
        *(
            "mtp.layers.0.mlp.experts.0.up_proj.weight",
            "model.layers.1.mlp.experts.down_proj_scale_inv",
            "quant_method",
        ),
        *("weight_block_size", "num_experts", "hidden_size", "num_hidden_layers", "model.visual.blocks.0.x"),
    ]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 7),
    st.integers(),
    st.floats(),
    WORDS,
    st.text(st.characters(), max_size=6),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def paths(value: object, here: tuple = ()) -> Iterator[tuple]:
    """The place of every value within a JSON value."""
    yield here
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from paths(value[key], (*here, key))  # type: ignore[index]


@st.composite
def changed(draw: st.DrawFn, text: bytes) -> bytes:
    """The JSON ``text`` with values replaced, added or taken away, and with bytes changed."""
    value = json.loads(text)
    if "model_type" in value:
        value.update(draw(st.dictionaries(OF_CONFIGS, VALUES, max_size=3)))
    for _ in range(draw(st.integers(0, 2))):
        *above, last = draw(st.sampled_from([place for place in paths(value) if place] or [("x",)]))
        box = value
        for key in above:
            box = box[key]
        deed = draw(st.sampled_from(["replace", "add", "rename"]))
        if deed == "replace" or not isinstance(box, dict):
            box[last] = draw(VALUES)
        else:
            box[draw(WORDS)] = draw(VALUES) if deed == "add" else box.pop(last, None)
    found = json.dumps(value).encode()
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        begin = draw(st.integers(0, len(found)))
        end = min(len(found), begin + draw(st.integers(0, 8)))
        found = (
            found[:begin]
            + draw(st.binary(max_size=6) | st.sampled_from([b'"', b"{", b"NaN", b"\\ud800"]))
            + found[end:]
        )
    return found


@pytest.fixture(scope="module", params=["experts", "fused"])
def untouched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("fuzz") / "source", request.param)


def only_our_errors(untouched: Path, data: st.DataObject) -> None:
    folder = untouched.with_name("changed")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(untouched, folder)
    # One at a time, mostly: the first fault is the one that is said.
    for file in data.draw(st.sampled_from([[CONFIG], [CONFIG], [INDEX], [FIRST], [FIRST, INDEX, CONFIG]])):
        write(folder, file, data.draw(changed(read(folder, file))))
    target = untouched.with_name("target")
    try:
        found = checkpoints.inspect(folder)
        to = "stacked" if found.layout != "stacked" else "fused"
        checkpoints.convert(folder, target, to, fsync=False, verify=True)
    except CheckpointError as error:
        assert str(folder) in str(error) or "config" in str(error)
        assert len(str(error)) < 10_000
        str(error).encode()
    finally:
        shutil.rmtree(target, ignore_errors=True)


NO_DEADLINE = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


@settings(NO_DEADLINE, max_examples=examples(30))
@given(data=st.data())
def test_only_our_errors_come_out(untouched: Path, data: st.DataObject) -> None:
    only_our_errors(untouched, data)


@pytest.mark.slow
@settings(NO_DEADLINE, max_examples=examples(1500))
@given(data=st.data())
def test_only_our_errors_come_out_for_long(untouched: Path, data: st.DataObject) -> None:
    only_our_errors(untouched, data)
