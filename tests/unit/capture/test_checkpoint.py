"""Checkpoints that nobody here made: broken ones are refused in one line; none runs or fetches code."""

import json
import re
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.coverage_models import MODELS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from commands import call
from tessera.capture import build, place_of, record_step
from tessera.capture.models import checkpoint
from tessera.errors import CaptureError
from tessera.ir import Step, Trace, load

CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
NORM = "model.norm.weight"
Break = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as it should be."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    module: Any = build(Step(str(folder), "decode", 1, 8, seed=3, random_weights=True)).module
    module.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to be broken."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def header_of(folder: Path) -> tuple[dict[str, Any], bytes]:
    """What model.safetensors says it holds, and its bytes."""
    raw = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def packed(header: dict[str, Any] | bytes, data: bytes, size: int | None = None) -> bytes:
    """A safetensors file, which may lie about its header's size."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def weights(change: Callable[[dict[str, Any], bytes], bytes]) -> Break:
    """Another file of weights, made from the header and the bytes of the right one."""
    return lambda folder: _write(folder / "model.safetensors", change(*header_of(folder)))


def tensor(**changes: Any) -> Break:
    """The header says something else of one tensor."""
    return weights(lambda head, data: packed(head | {NORM: head[NORM] | changes}, data))


def config(**changes: Any) -> Break:
    """Another configuration."""
    return lambda folder: _write(folder / "config.json", json.dumps(CONFIG | changes).encode())


def text(words: bytes) -> Break:
    """Another config.json."""
    return lambda folder: _write(folder / "config.json", words)


def index(**files: Any) -> Break:
    """An index beside the weights."""

    def change(folder: Path) -> None:
        document = {"weight_map": files or {}}
        _write(folder / "model.safetensors.index.json", json.dumps(document).encode())

    return change


def _write(path: Path, contents: bytes) -> None:
    path.write_bytes(contents)


def _twice(head: dict[str, Any], data: bytes) -> bytes:
    start, stop = head[NORM]["data_offsets"]
    again = head[NORM] | {"data_offsets": [len(data), len(data) + stop - start]}
    entry = b", " + json.dumps(NORM).encode() + b": " + json.dumps(again).encode() + b"}"
    return packed(json.dumps(head).encode()[:-1] + entry, data + data[start:stop])


def _without(head: dict[str, Any], data: bytes) -> bytes:
    start, stop = head[NORM]["data_offsets"]
    moved = {
        name: about
        if name == "__metadata__"
        else about | {"data_offsets": [x - (stop - start) * (x >= stop) for x in about["data_offsets"]]}
        for name, about in head.items()
        if name != NORM
    }
    return packed(moved, data[:start] + data[stop:])


def _link(folder: Path) -> None:
    outside = folder.parent / "elsewhere.safetensors"
    (folder / "model.safetensors").rename(outside)
    (folder / "model.safetensors").symlink_to(outside)


def _folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def _one_of_four(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00002-of-00004.safetensors")


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


# What was done to the folder -> what the one line says.
BROKEN: dict[str, tuple[Break, str]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no weights.*--random-weights"),
    "pickled weights": (_pickled, r"pytorch_model\.bin.*can run code"),
    "one file of four": (_one_of_four, "model-00002-of-00004.safetensors, 1 in all, and no .*index.json"),
    "an empty file": (weights(lambda head, data: b""), "header too small"),
    "a folder for a file": (_folder, "is no file"),
    "a cut file": (weights(lambda head, data: packed(head, data[:-7])), "broken: .*covered"),
    "a cut header": (weights(lambda head, data: packed(head, b"")[:40]), "broken: .*invalid header length"),
    "a header beyond the file": (weights(lambda head, data: packed(head, data, 2**40)), "header too large"),
    "a header that is no JSON": (weights(lambda head, data: packed(b"{]", data)), "invalid JSON"),
    "a header that is no UTF-8": (weights(lambda head, data: packed(b'{"\xff":1}', data)), "invalid UTF-8"),
    "a deep header": (weights(lambda head, data: packed(b'{"a":' + b"[" * 9999, data)), "recursion limit"),
    "offsets beyond the file": (tensor(data_offsets=[0, 2**40]), "invalid offset"),
    "overlapping offsets": (tensor(data_offsets=[0, 128]), "invalid offset"),
    "a negative shape": (tensor(shape=[-32]), "expected usize"),
    "a huge shape": (tensor(shape=[2**62, 64]), "overflow"),
    "a huge number": (
        weights(lambda h, d: packed(b'{"a":{"shape":[' + b"9" * 100_000, d)),
        "number out of range",
    ),
    "an unknown dtype": (tensor(dtype="F99"), "unknown variant"),
    "another dtype": (tensor(dtype="I32"), f"differ in the shape or type of {NORM}"),
    "another shape": (tensor(shape=[4, 8]), f"differ in the shape or type of {NORM}"),
    "a tensor twice": (weights(_twice), "broken: .*invalid offset"),
    "a tensor too few": (weights(_without), f"lack {NORM}.*--random-weights"),
    "a link out of the folder": (_link, "a link out of"),
    "an index to elsewhere": (index(x="../elsewhere.safetensors"), "its index names '../elsewhere"),
    "an index to an absolute path": (index(x="/etc/x.safetensors"), "its index names '/etc"),
    "an index to pickles": (index(x="pytorch_model.bin"), r"its index names 'pytorch_model\.bin'"),
    "an index to a number": (index(x=7), "no weight_map"),
    "an empty index": (index(), "no weight_map"),
    "an index to no file": (index(x="other.safetensors"), r"other\.safetensors: is missing"),
    "an index to no tensor": (
        index(**{NORM: "model.safetensors", "y": "model.safetensors"}),
        "index names y,",
    ),
    "no JSON": (text(b"{"), "is no JSON"),
    "no UTF-8": (text(b"\xff\xfe{}"), "is no JSON"),
    "no object": (text(b"[]"), "a list, not an object"),
    "deep JSON": (text(b'{"a":' * 100_000), "is no JSON"),
    "rather deep JSON": (text(b'{"a":' * 800 + b"1" + b"}" * 800), "nested too deeply|no model_type"),
    "a long integer": (text(b'{"vocab_size": ' + b"9" * 100_000 + b"}"), "is no JSON: Exceeds the limit"),
    "no model type": (config(model_type=None), "no model_type None"),
    "a model type of many": (config(model_type=["llama"]), "no model_type"),
    "an unknown model type": (
        config(model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
        "no model_type",
    ),
    "no layers": (config(num_hidden_layers=0), "no model has num_hidden_layers = 0"),
    "negative layers": (config(num_hidden_layers=-1), "no model has num_hidden_layers = -1"),
    "too many layers": (config(num_hidden_layers=10**12), "no model has num_hidden_layers = 10{12}"),
    "many layers": (config(num_hidden_layers=40), "more than 200 tensors"),
    "a huge width": (config(hidden_size=10**18, head_dim=8), "no model has hidden_size = 10"),
    "a width beyond memory": (
        config(hidden_size=10**12, head_dim=8),
        "its weights take .* GB of memory are free",
    ),
    "a width beyond its files": (config(hidden_size=2**20, head_dim=8), "its files hold .*this model has"),
    "a huge number in a list": (config(layer_types=[10**30]), "no model has layer_types"),
    "too many labels": (config(num_labels=10**12), "no model has num_labels"),
    "a word for a number": (config(hidden_size="wide"), "cannot be built from it"),
    "half a head": (config(num_attention_heads=2.5), "cannot be built from it"),
    "no class": (config(architectures=7), "cannot be built from it"),
    "another's class": (config(architectures=["GPT2LMHeadModel"]), "cannot be built from it"),
    "no dtype": (config(dtype="int8"), "no model has dtype"),
    "another width": (config(hidden_size=40), "differ in the shape"),
    "heads that share nothing": (config(num_key_value_heads=3, head_dim=8), "differ in the shape"),
    "one layer more": (config(num_hidden_layers=2), "its weights lack model.layers.1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_refused_in_one_line(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Place, reason, exit code 2; no traceback, and no trace is written."""
    change, words = BROKEN[name]
    change(folder)
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(checkpoint, "MAX_TENSORS", 200)

    code, out, err = call("capture", folder, "--context", 8, capsys=capsys)

    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert (2, "", 1) == (code, out, len(lines)), err
    assert "Traceback" not in err
    assert str(folder) in lines[0]
    assert re.search(words, lines[0])


def test_sizes_that_published_configurations_have_are_taken(folder: Path) -> None:
    """BLT's vocabulary of groups is no count of groups; GLM-5's width of heads is 0 where it has none."""
    config(encoder_hash_byte_group_vocab=500_002, nested={"head_dim": 0})(folder)
    found = checkpoint.read_settings(folder)

    assert (500_002, {"head_dim": 0}) == (found["encoder_hash_byte_group_vocab"], found["nested"])


def test_what_a_configuration_says_of_code_and_kernels_is_not_heard(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention is ours, nothing is imported, and nobody is called."""
    named = {"_attn_implementation": "someone/kernel", "attn_implementation": "someone/kernel"}
    code = {
        "auto_map": {"AutoModelForCausalLM": "theirs.Model"},
        "custom_pipelines": {"x": {"impl": "theirs.P"}},
    }
    config(**named, **code, use_kernels=True, nested=named, dtype="auto")(folder)
    (folder / "theirs.py").write_text("raise SystemExit(7)")
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("a connection was tried"))

    module: Any = build(Step(str(folder), "decode", 1, 8)).module

    assert torch.float32 == module.dtype  # that of the weights
    assert "tessera" == module.config._attn_implementation
    assert not hasattr(module.config, "auto_map")
    assert {} == module.config.nested


def test_weights_that_are_no_numbers_are_weights(folder: Path) -> None:
    """NaN is a value like any other."""
    start, stop = header_of(folder)[0][NORM]["data_offsets"]
    weights(lambda head, data: packed(head, data[:start] + b"\xff" * (stop - start) + data[stop:]))(folder)

    assert build(Step(str(folder), "decode", 1, 8)).weights()[NORM].isnan().all()


@pytest.mark.parametrize(("dtype", "own"), [(None, torch.bfloat16), ("float16", torch.float16)])
def test_without_a_dtype_a_model_has_its_weights(folder: Path, dtype: str | None, own: torch.dtype) -> None:
    """As in transformers; also where shapes alone are asked for."""
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, folder / "model.safetensors")
    settings = {name: value for name, value in CONFIG.items() if name not in ("dtype", "torch_dtype")}
    settings |= {} if dtype is None else {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(settings))

    assert own == build(Step(str(folder), "decode", 1, 8)).weights()[NORM].dtype
    with torch.device("meta"):
        assert own == build(Step(str(folder), "decode", 1, 8)).weights()[NORM].dtype


def test_counts_of_published_models_are_allowed(folder: Path) -> None:
    """Doge has 16,384 experts."""
    config(num_experts=16_384)(folder)

    assert build(Step(str(folder), "decode", 1, 8)).weights()


def test_random_weights_are_asked_for_and_remembered(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trace says so, hence whoever builds the step again makes the same ones."""
    (folder / "model.safetensors").unlink()
    words = ("capture", folder, "--context", 8, "--random-weights", "--seed", 3, "-o", folder / "d.trace")

    assert 0 == call(*words, capsys=capsys)[0]
    step = load(Trace, folder / "d.trace").step
    assert step == Step(str(folder.resolve()), "decode", 1, 8, 3, random_weights=True)
    assert torch.equal(build(step).weights()[NORM], build(step).weights()[NORM])


def test_shapes_alone_need_no_weights(folder: Path) -> None:
    """A fake capture of a configuration."""
    (folder / "model.safetensors").unlink()

    assert record_step(Step(str(folder), "decode", 1, 8), "fake").launches


def test_weights_that_stay_in_float32_do_so_without_values(tmp_path: Path) -> None:
    """The correction of a router's scores, in a model of bfloat16."""
    model = next(model for model in MODELS if model.name == "deepseek_v3")
    config = AutoConfig.for_model(model.family, **model.sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    step = Step(str(tmp_path), "decode", 1, 8)
    with torch.device("meta"):
        bare = build(step).weights()
    types = {name: tensor.dtype for name, tensor in build(step).weights().items()}

    assert {torch.bfloat16, torch.float32} == set(types.values())
    assert types == {name: tensor.dtype for name, tensor in bare.items()}


def test_an_error_of_two_lines_is_told_with_its_cause(folder: Path) -> None:
    """Transformers names the rule first, and then what breaks it."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 64.5}))

    with pytest.raises(CaptureError, match="Field 'hidden_size' expected int, got float"):
        build(Step(str(folder), "decode", 1, 8))


def test_weights_that_are_no_numbers_are_told(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, NORM: weights[NORM] * float("nan")}, folder / "model.safetensors", {"format": "pt"})

    with pytest.raises(CaptureError, match="its weights give no finite logits"):
        build(Step(str(folder), "tokens", 1, 1, reserve=32))


@pytest.fixture
def cache(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in Hugging Face's local cache: files are links to blobs."""
    repository = tmp_path / "hub" / "models--some-one--a.model"
    snapshot = repository / "snapshots" / ("0a" * 20)
    for place in (snapshot, repository / "refs", repository / "blobs"):
        place.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0a" * 20)
    for number, file in enumerate(sorted(whole.iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def test_a_name_is_found_in_the_local_cache(cache: Path, whole: Path) -> None:
    """Its main revision, with the weights behind the links."""
    assert str(cache.resolve()) == place_of("some-one/a.model")
    built, right = (build(Step(x, "decode", 1, 8)).weights() for x in ("some-one/a.model", str(whole)))
    assert torch.equal(built[NORM], right[NORM])


@pytest.mark.parametrize("revision", ["../../../elsewhere", "0b" * 20, "", "\0"])
def test_a_cache_that_leads_elsewhere_is_not_followed(cache: Path, revision: str) -> None:
    """A reference names a revision that is there, or nothing."""
    (cache.parent.parent / "refs" / "main").write_text(revision)

    assert "some-one/a.model" == place_of("some-one/a.model")


def test_a_name_that_is_not_here_is_answered_with_how_to_get_it(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the command."""
    code, _, err = call("capture", "meta-llama/Llama-3.1-8B", capsys=capsys)

    assert 2 == code
    assert "Download it: hf download meta-llama/Llama-3.1-8B" in err


_FOLDERS: list[Path] = []


@pytest.fixture(autouse=True)
def _keep(folder: Path) -> None:
    """Hypothesis makes many examples of one folder."""
    _FOLDERS[:] = [folder]


NUMBERS = st.one_of(
    st.integers(-3, 100), st.integers(), st.floats(), st.text(max_size=3), st.none(), st.booleans()
)
VALUES = st.one_of(
    NUMBERS, st.lists(NUMBERS, max_size=3), st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2)
)


def _is_built_or_refused_in_one_line() -> bool:
    try:
        return build(Step(str(_FOLDERS[0]), "decode", 1, 8)) is not None
    except CaptureError as error:
        return str(error).count("\n") == 0


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from(sorted(CONFIG)), VALUES, min_size=1, max_size=2))
def test_any_values_of_a_configuration_give_a_model_or_one_error(values: dict[str, Any]) -> None:
    """Never another exception."""
    config(**values)(_FOLDERS[0])

    assert _is_built_or_refused_in_one_line()


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_header_gives_a_model_or_one_error(data: st.DataObject) -> None:
    """One field of one tensor is exchanged, or some bytes of the header are."""
    head, contents = header_of(_FOLDERS[0])
    name = data.draw(st.sampled_from(sorted(head)))
    field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "bytes"]))
    if field == "bytes":
        raw = bytearray(json.dumps(head).encode())
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        made = packed(bytes(raw), contents)
    else:
        made = packed(head | {name: head[name] | {field: data.draw(VALUES)}}, contents)
    right = (_FOLDERS[0] / "model.safetensors").read_bytes()
    _write(_FOLDERS[0] / "model.safetensors", made)
    try:
        assert _is_built_or_refused_in_one_line()
    finally:
        _write(_FOLDERS[0] / "model.safetensors", right)


@pytest.mark.parametrize("name", ["no weights", "a cut file", "too many layers", "a tensor too few"])
def test_a_broken_checkpoint_is_not_served(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same line, and nothing is started."""
    change, words = BROKEN[name]
    change(folder)
    tokens = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokens).save_pretrained(folder)

    code, _, err = call("serve", folder, "--port", 0, capsys=capsys)

    assert 2 == code
    assert re.search(f"error: {folder}.*{words}", err)


def test_sizes_that_do_not_fit_together_are_told_when_the_step_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three key heads for four query heads: the model can be built and not run."""
    config(num_key_value_heads=3, head_dim=8)(folder)

    code, _, err = call("capture", folder, "--context", 8, "--random-weights", capsys=capsys)

    assert 2 == code
    assert f"error: {folder.resolve()}: " in err
    assert "Traceback" not in err


def test_infinity_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    """JSON has no infinity; Mamba 2's limit of time steps is one."""
    (tmp_path / "config.json").write_text('{"time_step_limit": [0.0, {"__float__": "Infinity"}]}')

    assert [0.0, float("inf")] == checkpoint.read_settings(tmp_path)["time_step_limit"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("adapter_config.json", "LoRA adapter.*merge"),
        ("a.gguf", "GGUF.*safetensors"),
        ("a", "no config.json"),
    ],
)
def test_a_folder_without_a_configuration_says_what_it_holds(file: str, message: str, tmp_path: Path) -> None:
    """An adapter, a GGUF file, or nothing that is known."""
    (tmp_path / file).write_text("{}")

    with pytest.raises(CaptureError, match=message):
        build(Step(str(tmp_path), "decode", 1, 8))
