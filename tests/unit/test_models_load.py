"""Loading directories: strict, from safetensors alone, quantised or not, with adapters."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny_models
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model, quantize_model

from mlxbatch.errors import ModelError
from mlxbatch.models import load
from mlxbatch.models.loader import context_length
from mlxbatch.models.source import resolve

PROMPT = mx.array([[5, 300, 7, 41, 41, 200, 9, 3, 77, 150, 260, 12]])


def largest_error(one: mx.array, other: mx.array) -> float:
    return float(mx.abs(one - other).max() / mx.abs(other).max())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_models.write_dir("llama", tmp_path / "model")


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_a_directory_loads_as_mlx_lm_loads_it(name: str, tmp_path: Path) -> None:
    path = tiny_models.write_dir(name, tmp_path / name)
    loaded = load(str(path))
    theirs, _ = load_model(path)
    assert mx.array_equal(loaded.model(PROMPT), theirs(PROMPT))
    assert loaded.name == name
    assert loaded.max_model_len == tiny_models.MAX_POSITIONS
    assert loaded.eos_token_ids == {2}
    assert loaded.dtype == mx.float32
    assert loaded.weight_bytes == sum(array.nbytes for _, array in tree_flatten(theirs.parameters()))
    assert not loaded.model.training


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_dtype_can_be_asked_for(dtype: Any, folder: Path) -> None:
    loaded = load(str(folder), dtype=dtype)
    assert loaded.dtype == getattr(mx, dtype)
    assert {array.dtype for _, array in tree_flatten(loaded.model.parameters())} == {getattr(mx, dtype)}


def quantised(folder: Path, target: Path, mode: str, bits: int, group_size: int) -> Path:
    model, config = load_model(folder)
    if mode == "affine":
        model.set_dtype(mx.bfloat16)
    _, config = quantize_model(model, config, group_size, bits, mode=mode)
    shutil.copytree(folder, target)
    mx.save_safetensors(str(target / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize(
    ("mode", "bits", "group_size"),
    [*(("affine", bits, 32) for bits in (2, 3, 4, 5, 6, 8)), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)],
)
def test_quantised_weights_are_dequantised_exactly_for_float32(
    name: str, mode: str, bits: int, group_size: int, tmp_path: Path
) -> None:
    source = tiny_models.write_dir(name, tmp_path / "plain")
    path = quantised(source, tmp_path / "quantised", mode, bits, group_size)
    loaded = load(str(path))
    assert loaded.dtype == mx.float32
    assert {
        type(module) for _, module in loaded.model.named_modules() if "Quantized" in type(module).__name__
    } == set()
    theirs, _ = load_model(path)
    for (path_here, module), (path_there, original) in zip(
        loaded.model.named_modules(), theirs.named_modules(), strict=True
    ):
        assert path_here == path_there
        if "scales" in original:
            wide = [original.scales, original.get("biases")]
            if mode == "affine":
                wide = [array.astype(mx.float32) for array in wide]
            expected = mx.dequantize(
                original.weight, *wide, group_size=group_size, bits=bits, mode=mode, dtype=mx.float32
            )
            assert mx.array_equal(module.weight, expected)
    theirs.set_dtype(mx.float32)
    assert largest_error(loaded.model(PROMPT), theirs(PROMPT)) < 1e-4


def test_on_a_mac_quantised_weights_stay_as_they_are(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = quantised(folder, tmp_path / "quantised", "affine", 4, 32)
    monkeypatch.setattr("sys.platform", "darwin")
    loaded = load(str(path))
    assert loaded.dtype == mx.bfloat16
    assert loaded.model.layers[0].self_attn.q_proj.bits == 4
    assert loaded.weight_bytes < load(str(folder)).weight_bytes / 4


def rewrite(folder: Path, change: Any) -> None:
    weights = dict(mx.load(str(folder / "model.safetensors")))
    change(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights)


def test_missing_weights_are_listed(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"(?s)does not fit.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load(str(folder))


def test_unexpected_weights_are_listed(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.update({"model.layers.9.extra": mx.zeros(3)}))
    with pytest.raises(ModelError, match=r"(?s)does not fit.*model\.layers\.9\.extra"):
        load(str(folder))


def test_weights_of_another_shape_are_named(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.update({"model.norm.weight": mx.zeros(3)}))
    with pytest.raises(ModelError, match=r"does not fit.*model\.norm\.weight"):
        load(str(folder))


def test_a_list_of_thousands_is_cut(tmp_path: Path) -> None:
    folder = tiny_models.write_dir("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 400}))
    with pytest.raises(ModelError) as caught:
        load(str(folder))
    assert len(str(caught.value)) < 2000


def safetensors_with(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        safetensors_with(b"", length=1 << 62),
        safetensors_with(b"{" * 100),
        safetensors_with(b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}'),
        safetensors_with(b'{"a": {"dtype": "F32", "shape": [4611686018427387], "data_offsets": [0, 16]}}', bytes(16)),
        safetensors_with(b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}', bytes(16)),
        safetensors_with(b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 16]}}', bytes(16)),
        safetensors_with(b'{"a": {"dtype": "X99", "shape": [4], "data_offsets": [0, 16]}}', bytes(16)),
        safetensors_with(b"[" * 200_000),
    ],
)  # fmt: skip
def test_damaged_safetensors_are_refused(content: bytes, folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or cut short"):
        load(str(folder))


@pytest.mark.parametrize("share", [0.3, 0.999])
def test_safetensors_cut_short_are_refused(share: float, folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelError, match="damaged or cut short"):
        load(str(folder))


def test_a_missing_shard_is_named(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"incomplete, missing model-00002-of-00002\.safetensors"):
        load(str(folder))


def test_pickles_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"holds no model\*\.safetensors.*pytorch_model\.bin, which can run code"):
        load(str(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "names no model_type"),
        ({"model_type": "../../os"}, "names no model_type"),
        ({"model_type": "never_heard_of"}, "model type 'never_heard_of' is not supported"),
        ({"model_type": "cache"}, "model type 'cache' is not supported"),
        ({"model_file": "evil.py"}, "wants to run its own code"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        ({"hidden_size": 1 << 40}, "hidden_size is 1099511627776"),
        ({"num_attention_heads": 0}, "cannot load|cannot build"),
    ],
)
def test_configurations_that_lie_are_refused(change: dict[str, object], message: str, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=message):
        load(str(folder))


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": ' * 100_000, "\x00\xff"])
def test_a_broken_config_is_refused(content: str, folder: Path) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load(str(folder))


def test_a_broken_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"')
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        load(str(folder))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("smollm2-135", "did you mean smollm2-135m"),
        ("nothing-like-it", "no catalog name, no directory"),
        ("./nowhere", "there is no model at nowhere"),
        ("gone.gguf", r"there is no model at gone\.gguf"),
        ("a/b/c", "is no hub repository; write OWNER/NAME"),
    ],
)
def test_names_that_lead_nowhere_say_what_to_do(spec: str, message: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message):
        load(spec)


def test_a_revision_is_refused_where_there_are_none(folder: Path) -> None:
    for name in (str(folder), "smollm2-135m"):
        with pytest.raises(ModelError, match="has no revisions"):
            resolve(name, revision="main")



def test_a_fingerprint_follows_the_content_and_not_the_place(folder: Path, tmp_path: Path) -> None:
    first = load(str(folder)).fingerprint
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert load(str(tmp_path / "elsewhere")).fingerprint == first
    rewrite(tmp_path / "elsewhere", lambda weights: weights.update({"model.norm.weight": mx.ones(64)}))
    assert load(str(tmp_path / "elsewhere")).fingerprint != first


def write_adapter(folder: Path, target: Path, **config: Any) -> nn.Module:
    """An adapter with random weights, and the model that wears it."""
    settings = {"rank": 4, "scale": 10.0, "dropout": 0.0}
    model, _ = load_model(folder)
    linear_to_lora_layers(model, 2, settings)
    mx.random.seed(3)
    weights = {
        name: mx.random.normal(array.shape) * 0.1
        for name, array in tree_flatten(model.parameters())
        if name.endswith(("lora_a", "lora_b"))
    }
    model.load_weights(list(weights.items()), strict=False)
    target.mkdir()
    mx.save_safetensors(str(target / "adapters.safetensors"), weights)
    (target / "adapter_config.json").write_text(
        json.dumps({"num_layers": 2, "lora_parameters": settings, "fine_tune_type": "lora", **config})
    )
    model.eval()
    return model


def test_an_adapter_is_put_on_the_model(folder: Path, tmp_path: Path) -> None:
    expected = write_adapter(folder, tmp_path / "adapter")
    plain, worn = load(str(folder)), load(str(folder), adapter=str(tmp_path / "adapter"))
    assert mx.array_equal(worn.model(PROMPT), expected(PROMPT))
    assert largest_error(worn.model(PROMPT), plain.model(PROMPT)) > 0.01
    assert worn.fingerprint != plain.fingerprint


def test_an_adapter_without_all_its_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    write_adapter(folder, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapters.safetensors"
    weights = dict(mx.load(str(path)))
    weights.pop("model.layers.2.self_attn.q_proj.lora_b")
    mx.save_safetensors(str(path), weights)
    with pytest.raises(ModelError, match=r"lacks weights for model\.layers\.2\.self_attn\.q_proj\.lora_b"):
        load(str(folder), adapter=str(tmp_path / "adapter"))


def test_an_adapter_for_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    write_adapter(tiny_models.write_dir("mistral", tmp_path / "other"), tmp_path / "adapter")
    with pytest.raises(ModelError, match="cannot use the adapter"):
        load(str(folder), adapter=str(tmp_path / "adapter"))


def test_what_is_no_adapter_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no adapter_config\.json"):
        load(str(folder), adapter=str(tmp_path))
    with pytest.raises(ModelError, match="there is no adapter at"):
        load(str(folder), adapter=str(tmp_path / "none" / "there"))


def write_peft_adapter(target: Path, layers: dict[str, tuple[int, int]], **config: Any) -> dict[str, mx.array]:
    """An adapter as peft writes it, of rank 4 and alpha 8, for layers of (outputs, inputs)."""
    target.mkdir(exist_ok=True)
    weights = {}
    for index, (path, (outputs, inputs)) in enumerate(layers.items()):
        key = mx.random.key(index)
        weights[f"base_model.model.{path}.lora_A.weight"] = mx.random.normal((4, inputs), key=key) * 0.2
        weights[f"base_model.model.{path}.lora_B.weight"] = mx.random.normal((outputs, 4), key=key) * 0.2
    mx.save_safetensors(str(target / "adapter_model.safetensors"), weights)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    (target / "adapter_config.json").write_text(json.dumps(settings))
    return weights


PEFT_LAYERS = {"model.layers.0.self_attn.q_proj": (64, 64), "model.layers.2.mlp.down_proj": (64, 96)}


@pytest.mark.parametrize("rslora", [False, True])
def test_a_peft_adapter_computes_what_merged_weights_do(rslora: bool, folder: Path, tmp_path: Path) -> None:
    adapter = write_peft_adapter(tmp_path / "adapter", PEFT_LAYERS, use_rslora=rslora)
    merged = load(str(folder)).model
    for path in PEFT_LAYERS:
        layer = dict(merged.named_modules())[path]
        a, b = (adapter[f"base_model.model.{path}.lora_{half}.weight"] for half in "AB")
        layer.weight = layer.weight + (8 / 4**0.5 if rslora else 8 / 4) * (b @ a)
    worn = load(str(folder), adapter=str(tmp_path / "adapter"))
    assert largest_error(worn.model(PROMPT), merged(PROMPT)) < 1e-5
    assert largest_error(worn.model(PROMPT), load(str(folder)).model(PROMPT)) > 1e-2


@pytest.mark.parametrize(
    ("layers", "config", "message"),
    [
        (PEFT_LAYERS, {"use_dora": True}, "use_dora = True is not supported"),
        (PEFT_LAYERS, {"peft_type": "IA3"}, "peft_type = 'IA3' is not supported"),
        (PEFT_LAYERS, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (PEFT_LAYERS, {"lora_alpha": None}, "cannot use the adapter"),
        ({"model.layers.9.self_attn.q_proj": (64, 64)}, {}, r"does not have: model\.layers\.9"),
        ({"model.layers.0.self_attn.q_proj": (32, 64)}, {}, "a model of another size"),
    ],
)
def test_peft_adapters_that_cannot_be_honoured_are_refused(
    layers: dict[str, tuple[int, int]], config: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    write_peft_adapter(tmp_path / "adapter", layers, **config)
    with pytest.raises(ModelError, match=message):
        load(str(folder), adapter=str(tmp_path / "adapter"))


def test_half_a_peft_layer_is_refused(folder: Path, tmp_path: Path) -> None:
    weights = write_peft_adapter(tmp_path / "adapter", PEFT_LAYERS)
    weights.pop("base_model.model.model.layers.2.mlp.down_proj.lora_B.weight")
    mx.save_safetensors(str(tmp_path / "adapter" / "adapter_model.safetensors"), weights)
    with pytest.raises(ModelError, match=r"make no LoRA layer: model\.layers\.2\.mlp\.down_proj"):
        load(str(folder), adapter=str(tmp_path / "adapter"))


def test_the_context_length_is_found_wherever_a_family_keeps_it() -> None:
    assert context_length({"max_position_embeddings": 5}) == 5
    assert context_length({"text_config": {"max_position_embeddings": 6}, "max_position_embeddings": 7}) == 6
    assert context_length({"n_positions": 8}) == 8
    assert context_length({"model_type": "mamba"}) > 1000


def test_import_bits_are_checked(folder: Path) -> None:
    with pytest.raises(ModelError, match="import bits must be 4, 8 or 16"):
        load(str(folder), import_bits=5)
