"""Importing GGUF files: weights, storage, configuration, and the refusals.

Second implementations: the original mlx-lm model that a file was written from; the `gguf` package for the
quantised values; mx.load (gguf-tools in C) for a whole file. Greedy tokens of every family here, and of
SmolLM2, were also compared once with llama.cpp's own: equal.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tiny_gguf
from gguf import GGML_QUANT_SIZES, GGUFValueType, GGUFWriter
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from mlxbatch.errors import ModelError
from mlxbatch.models import load
from mlxbatch.models.gguf_affine import GROUP, affine_bits, read_affine
from mlxbatch.models.gguf_config import build_config
from mlxbatch.models.gguf_file import GgufTensor, read_gguf
from mlxbatch.models.gguf_tensors import read_float32
from mlxbatch.models.gguf_weights import plan_storage, read_weights

PROMPT = mx.array([[5, 300, 7, 41, 41, 200, 9, 3, 77, 150, 260, 12]])


def logits(model: nn.Module) -> mx.array:
    return model(PROMPT)


def largest_error(one: mx.array, other: mx.array) -> float:
    return float(mx.abs(one - other).max() / mx.abs(other).max())


@pytest.mark.parametrize("family", tiny_gguf.FAMILIES)
def test_every_family_computes_what_its_original_does(family: str, tmp_path: Path) -> None:
    config = tiny_gguf.config_of(family)
    original = tiny_gguf.build(config)
    path = tiny_gguf.write(tmp_path / "model.gguf", family, original, config)
    loaded = load(str(path))
    assert loaded.dtype == mx.float32
    assert mx.array_equal(logits(loaded.model), logits(original))
    assert loaded.config["model_type"] in (config["model_type"], "llama")  # mistral's files say llama
    assert loaded.max_model_len == config["max_position_embeddings"]


@pytest.mark.parametrize("projection", ["q_proj", "k_proj"])
def test_the_comparison_would_notice_rows_in_the_wrong_order(projection: str, tmp_path: Path) -> None:
    config = tiny_gguf.config_of("llama")
    original = tiny_gguf.build(config)
    loaded = load(str(tiny_gguf.write(tmp_path / "model.gguf", "llama", original, config)))
    layer = getattr(loaded.model.layers[1].self_attn, projection)
    layer.weight = layer.weight.reshape(-1, 2, layer.weight.shape[1])[:, ::-1].reshape(layer.weight.shape)
    assert largest_error(logits(loaded.model), logits(original)) > 1e-3


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_quantised_files_give_the_values_of_the_gguf_package(kind: Type, bits: int, tmp_path: Path) -> None:
    config = tiny_gguf.config_of("qwen3")
    path = tiny_gguf.write(tmp_path / "model.gguf", "qwen3", tiny_gguf.build(config), config, kind)
    file = read_gguf(path)
    plan = plan_storage(file, bits)
    weights = dict(read_weights(file, plan, build_config(file), mx.float32))
    for stored in plan:
        expected = mx.array(read_float32(file, stored.tensor))
        if stored.bits is None:
            assert mx.array_equal(weights[stored.target], expected)
            continue
        values = mx.dequantize(
            weights[stored.target],
            weights[f"{stored.module}.scales"],
            weights[f"{stored.module}.biases"],
            group_size=stored.group_size,
            bits=stored.bits,
        )
        exact = affine_bits(kind) == bits
        assert stored.lossless == exact
        tolerance = 1e-6 if exact else {8: 0.01, 4: 0.15}[bits]
        assert largest_error(values, expected) < tolerance
    model = load(str(path), import_bits=bits).model
    quantised = [module for _, module in model.named_modules() if isinstance(module, nn.QuantizedLinear)]
    assert bool(quantised) == (bits != 16)
    assert np.isfinite(np.array(logits(model))).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_mixture_of_experts_can_be_stored_quantised(bits: int, tmp_path: Path) -> None:
    config = tiny_gguf.config_of("mixtral")
    original = tiny_gguf.build(config)
    path = tiny_gguf.write(tmp_path / "model.gguf", "mixtral", original, config, Type.Q8_0)
    loaded = load(str(path), import_bits=bits)
    moe = loaded.model.layers[0].block_sparse_moe
    assert type(moe.gate) is nn.Linear  # a rounded router picks other experts
    assert moe.switch_mlp.up_proj.bits == bits
    assert loaded.weight_bytes < 0.6 * sum(a.nbytes for _, a in tiny_gguf.tree_flatten(original.parameters()))


def test_on_a_mac_the_file_keeps_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    config = tiny_gguf.config_of("llama")
    path = tiny_gguf.write(tmp_path / "model.gguf", "llama", tiny_gguf.build(config), config, Type.Q4_1)
    loaded = load(str(path))
    assert loaded.dtype == mx.float16
    assert loaded.model.layers[0].self_attn.q_proj.bits == 4
    assert loaded.config["quantization"]["model.layers.0.self_attn.q_proj"] == {"group_size": GROUP, "bits": 4}


AFFINE = [kind for kind in Type if affine_bits(kind)]
DEQUANTIZABLE = [
    kind
    for kind in Type
    if kind.name.startswith(("Q", "IQ", "TQ", "MXFP", "NVFP")) and kind.name not in ("Q8_1", "Q8_K", "Q1_0")
]


def random_blocks(kind: Type, rows: int, width: int) -> np.ndarray:
    """Random bytes, but finite and moderate where a block holds half-precision scales."""
    weights, nbytes = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(7).integers(0, 256, (rows * width // weights, nbytes), dtype=np.uint8)
    halves = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,),
              "Q2_K": (80, 82), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "NVFP4": (), "IQ1_M": ()}  # fmt: skip
    for at in halves.get(kind.name, (0,)):
        scale = np.random.default_rng(at).uniform(0.01, 1.0, (len(blocks), 1)).astype("<f2")
        blocks[:, at : at + 2] = scale.view(np.uint8)
    if kind.name == "MXFP4":
        blocks[:, 0] = 120 + blocks[:, 0] % 10
    if kind.name == "IQ1_M":  # its scale is spread over the high nibbles of four 16-bit words
        blocks[:, 48:56] &= 0x0F
        blocks[:, 55] |= 0x20
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", AFFINE, ids=lambda kind: kind.name)
def test_affine_blocks_are_repacked_exactly(kind: Type) -> None:
    raw = random_blocks(kind, 6, 512)
    affine = read_affine(raw.reshape(-1), (2, 3, 512), kind)
    values = mx.dequantize(
        mx.array(affine.packed()),
        mx.array(affine.scales),
        mx.array(affine.biases),
        group_size=GROUP,
        bits=affine.bits,
    )
    assert np.array_equal(np.array(values).reshape(6, 512), dequantize(raw, kind))


@pytest.mark.parametrize("kind", DEQUANTIZABLE, ids=lambda kind: kind.name)
def test_every_type_that_the_gguf_package_knows_is_read(kind: Type, tmp_path: Path) -> None:
    raw = random_blocks(kind, 8, 512)
    path = tmp_path / "one.gguf"
    writer = GGUFWriter(str(path), "llama")
    writer.add_tensor("token_embd.weight", raw, raw_shape=raw.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(path)
    values = read_float32(file, file.tensors["token_embd.weight"])
    assert values.shape == (8, 512)
    assert np.isfinite(values).all()
    assert np.array_equal(values, dequantize(raw, kind))


def test_mlx_reads_the_same_numbers_from_a_file(tmp_path: Path) -> None:
    config = tiny_gguf.config_of("qwen2")
    path = tiny_gguf.write(tmp_path / "model.gguf", "qwen2", tiny_gguf.build(config), config, Type.Q4_1)
    theirs = mx.load(str(path))
    file = read_gguf(path)
    for name, tensor in file.tensors.items():
        array = theirs[name]
        if tensor.type == Type.Q4_1:
            base = name.removesuffix(".weight")
            scales, biases = theirs[f"{base}.scales"], theirs[f"{base}.biases"]
            array = mx.dequantize(
                array, scales.astype(mx.float32), biases.astype(mx.float32), group_size=GROUP, bits=4
            )
        assert mx.array_equal(array, mx.array(read_float32(file, tensor))), name


def test_a_type_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    tensor = GgufTensor("blk.0.attn_q.weight", (1, 256), Type.Q8_K, tmp_path / "x.gguf", 0, 292)
    (tmp_path / "x.gguf").write_bytes(bytes(292))
    file = read_gguf_stub(tmp_path / "x.gguf", tensor)
    with pytest.raises(ModelError, match=r"attn_q.weight is stored as Q8_K, which cannot be read"):
        read_float32(file, tensor)


def read_gguf_stub(path: Path, tensor: GgufTensor):  # type: ignore[no-untyped-def]  # a header without a file
    from mlxbatch.models.gguf_file import GgufFile

    return GgufFile(path, {}, {tensor.name: tensor})


def write_small(path: Path, **metadata: tuple[object, GGUFValueType]) -> Path:
    config = tiny_gguf.config_of("llama")
    changes = {f"llama.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return tiny_gguf.write(path, "llama", tiny_gguf.build(config), config, metadata=changes)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope__scaling__type": ("dynamic", GGUFValueType.STRING)}, "rope scaling 'dynamic' is not supported"),
        ({"expert_count": (4, GGUFValueType.UINT32)}, "expert_used_count is missing"),
        ({"attention__scale": (0.25, GGUFValueType.FLOAT32)}, "llama.attention.scale = 0.25 is not supported"),
        ({"logit_scale": (16.0, GGUFValueType.FLOAT32)}, "llama.logit_scale = 16.0 is not supported"),
        ({"attn_logit_softcapping": (50.0, GGUFValueType.FLOAT32)}, "attn_logit_softcapping = 50.0 is not"),
        ({"attention__value_length": (8, GGUFValueType.UINT32)}, "value_length is not the head's size, 16"),
        ({"rope__dimension_count": (8, GGUFValueType.UINT32)}, "dimension_count is not the head's size, 16"),
        ({"attention__key_length": (1 << 30, GGUFValueType.UINT32)}, "key_length is 1073741824, not 1 to"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    metadata: dict[str, tuple[object, GGUFValueType]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        load(str(write_small(tmp_path / "model.gguf", **metadata)))


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(str(path), "rwkv7")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"GGUF architecture 'rwkv7' is not supported \(supported: llama, qwen2"):
        load(str(path))


def test_missing_and_unexpected_tensors_are_listed(tmp_path: Path) -> None:
    config = tiny_gguf.config_of("llama")
    model = tiny_gguf.build(config)
    del model.model.layers[1].mlp.up_proj
    with pytest.raises(ModelError, match=r"missing weights: model.layers.1.mlp.up_proj.weight"):
        load(str(tiny_gguf.write(tmp_path / "missing.gguf", "llama", model, config)))
    extra = tiny_gguf.build(config)
    extra.model.layers[0].self_attn.q_norm = nn.RMSNorm(16)
    with pytest.raises(ModelError, match=r"no place for: blk.0.attn_q_norm.weight"):
        load(str(tiny_gguf.write(tmp_path / "extra.gguf", "llama", extra, config)))


def test_a_split_model_is_one_model(tmp_path: Path) -> None:
    config = tiny_gguf.config_of("llama")
    original = tiny_gguf.build(config)
    whole = read_gguf(tiny_gguf.write(tmp_path / "whole.gguf", "llama", original, config))
    names = sorted(whole.tensors)
    for part, chosen in enumerate((names[::2], names[1::2]), start=1):
        writer = GGUFWriter(str(tmp_path / f"m-{part:05}-of-00002.gguf"), "llama")
        writer.add_uint16("split.count", 2)
        if part == 1:
            tiny_gguf._write_parameters(writer, "llama", config)
            tiny_gguf.write_tokenizer(writer)
        for name in chosen:
            writer.add_tensor(name, read_float32(whole, whole.tensors[name]))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    loaded = load(str(tmp_path / "m-00001-of-00002.gguf"))
    assert mx.array_equal(logits(loaded.model), logits(original))
    with pytest.raises(ModelError, match="name the first one instead"):
        load(str(tmp_path / "m-00002-of-00002.gguf"))
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf is missing"):
        load(str(tmp_path / "m-00001-of-00002.gguf"))
