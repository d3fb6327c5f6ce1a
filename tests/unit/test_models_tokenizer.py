"""Tokenizers: rebuilt from GGUF, loaded from directories, and decoding as a stream."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tiny_gguf
import tiny_models
from gguf import GGUFValueType, GGUFWriter, TokenType
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlxbatch.errors import ModelError, RequestError
from mlxbatch.models.directory_tokenizer import load_directory_tokenizer
from mlxbatch.models.gguf_file import GgufFile, read_gguf
from mlxbatch.models.gguf_pretokenizer import PRE_TOKENIZERS
from mlxbatch.models.gguf_tokenizer import build_tokenizer
from mlxbatch.models.stream_decoder import FastStreamDecoder, SlowStreamDecoder
from mlxbatch.models.tokenizer import FastCodec, ModelTokenizer

MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "The capital of France?"}]
TEXTS = [
    "The capital of France is Paris.",
    "  two  spaces\n\nand lines\t",
    "Zwölf Boxkämpfer, 1234567 Mal; déjà-vu 東京 🙂🏳️‍🌈",
    "<|im_start|>user\nhi<|im_end|>\n",
    "",
]
CORPUS = [*tiny_models._TRAINING_TEXT, "don't DON'T I'LL we've 1234567 12 東京都 \r\n\r\n   x", *TEXTS]


def written_gguf(path: Path, pre: str = "gpt-2", **flags: object) -> GgufFile:
    writer = GGUFWriter(str(path), "llama")
    tiny_gguf.write_tokenizer(writer, pre)
    for key, value in flags.items():
        writer.add_key_value(f"tokenizer.ggml.{key}", value, GGUFValueType.BOOL)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_gguf(path)


@pytest.fixture(scope="module")
def from_gguf(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return build_tokenizer(written_gguf(tmp_path_factory.mktemp("gguf") / "t.gguf"))


@pytest.fixture(scope="module")
def from_directory(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    folder = tmp_path_factory.mktemp("directory")
    tiny_models.write_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    return load_directory_tokenizer(folder, {"model_type": "llama", "eos_token_id": 7})


@pytest.mark.parametrize("text", TEXTS)
def test_a_rebuilt_tokenizer_gives_the_ids_of_the_original(text: str, from_gguf: ModelTokenizer) -> None:
    original = Tokenizer.from_str(tiny_models.tokenizer_json())
    ids = from_gguf.encode(text)
    assert ids == original.encode(text).ids
    assert from_gguf.decode(ids, skip_special_tokens=False) == text
    assert from_gguf.decode(ids) == original.decode(ids)
    assert from_gguf.vocab_size == tiny_models.VOCAB_SIZE


def test_end_tokens_are_those_of_every_source(from_gguf: ModelTokenizer, from_directory: ModelTokenizer) -> None:
    assert from_gguf.eos_token_ids == {0, 2}  # named by the file, and <|endoftext|> as a control token
    assert from_directory.eos_token_ids == {0, 2, 7}


def test_both_render_the_chat_template_alike(from_gguf: ModelTokenizer, from_directory: ModelTokenizer) -> None:
    text = "<|im_start|>user\nThe capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert from_gguf.render_chat(MESSAGES) == from_directory.render_chat(MESSAGES) == text
    assert from_gguf.encode_chat(MESSAGES) == from_directory.encode_chat(MESSAGES)
    assert from_gguf.encode_chat(MESSAGES).count(1) == 2
    assert "assistant" not in from_gguf.render_chat(MESSAGES, add_generation_prompt=False)


@pytest.mark.parametrize("add", [True, False])
def test_bos_is_added_once_where_it_is_wanted(add: bool, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(written_gguf(tmp_path / "t.gguf", add_bos_token=add))
    bos = tokenizer.bos_token_id
    assert (tokenizer.encode("hi")[0] == bos) == add
    assert tokenizer.encode("hi", add_bos=False)[0] != bos
    assert tokenizer.encode("<|im_start|>hi").count(1) == 1
    assert tokenizer.encode_chat(MESSAGES)[:2].count(1) == 1


def test_a_template_that_gives_two_bos_gets_one(from_gguf: ModelTokenizer) -> None:
    doubled = ModelTokenizer(
        from_gguf.codec,
        eos_token_ids=frozenset(),
        bos_token_id=1,
        special_tokens={"bos_token": "<|im_start|>"},
        chat_template="{{ bos_token }}{{ bos_token }}{{ messages[0].content }}",
    )
    assert doubled.encode_chat(MESSAGES).count(1) == 1


def test_arguments_of_a_template_may_have_any_name(from_gguf: ModelTokenizer) -> None:
    named = ModelTokenizer(
        from_gguf.codec,
        eos_token_ids=frozenset(),
        bos_token_id=None,
        special_tokens={},
        chat_template="{{ self }} {{ function }} {{ messages[0].content }}",
    )
    arguments: dict[str, object] = {"function": "b", "messages": "no", "arguments": "c"}
    assert named.render_chat(MESSAGES, **arguments).endswith(f"b {MESSAGES[0]['content']}")
    assert named.encode_chat(MESSAGES, **arguments, self="a")


def test_without_a_template_chat_is_refused(from_gguf: ModelTokenizer) -> None:
    plain = ModelTokenizer(
        from_gguf.codec, eos_token_ids=frozenset(), bos_token_id=None, special_tokens={}, chat_template=None
    )
    with pytest.raises(RequestError, match="no chat template") as caught:
        plain.encode_chat(MESSAGES)
    assert caught.value.code == "no_chat_template"


# What the models' own tokenizer.json files hold at this place, with texts cut by hand.
SPLITS = {
    "gpt-2": ["I'll", " pay", " 1234567", " €", "  "],
    "smollm": ["I'll", " pay", " ", "1", "2", "3", "4", "5", "6", "7", " €", "  "],
    "llama-bpe": ["I", "'ll", " pay", " ", "123", "456", "7", " €", "  "],
    "qwen2": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "6", "7", " €", "  "],
    "tekken": ["I", "'ll", " pay", " ", "1", "2", "3", "4", "5", "6", "7", " €", "  "],
    "gpt-4o": ["I'll", " pay", " ", "123", "456", "7", " €", "  "],
}


@pytest.mark.parametrize("name", SPLITS)
def test_pre_tokenizers_cut_where_their_models_do(name: str) -> None:
    text = "I'll pay 1234567 €  "
    pieces = [text[start:end] for _, (start, end) in PRE_TOKENIZERS[name].build().pre_tokenize_str(text)]
    if name == "gpt-2":
        pieces = [pieces[0] + pieces[1], *pieces[2:]]  # I, 'll
    if name == "smollm":
        pieces = [pieces[0] + pieces[1], *pieces[2:]]
    assert pieces == SPLITS[name]


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="pre-tokenizer 'bloom' is not supported"):
        build_tokenizer(written_gguf(tmp_path / "t.gguf", pre="bloom"))


def train_sentencepiece(prefix: bool) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20), model_writer=model, vocab_size=420, model_type="bpe", byte_fallback=True,
        character_coverage=0.98, add_dummy_prefix=prefix, remove_extra_whitespaces=False,
        normalization_rule_name="identity", split_digits=True, user_defined_symbols=["<user>"], minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_gguf(path: Path, original: sentencepiece.SentencePieceProcessor, prefix: bool) -> GgufFile:
    kinds = []
    for index in range(original.vocab_size()):
        kind = TokenType.NORMAL
        if original.is_unknown(index):
            kind = TokenType.UNKNOWN
        elif original.is_control(index):
            kind = TokenType.CONTROL
        elif original.is_byte(index):
            kind = TokenType.BYTE
        elif original.id_to_piece(index) == "<user>":
            kind = TokenType.USER_DEFINED
        kinds.append(kind)
    writer = GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([original.id_to_piece(index) for index in range(len(kinds))])
    writer.add_token_scores([original.get_score(index) for index in range(len(kinds))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(original.bos_id())
    writer.add_eos_token_id(original.eos_id())
    writer.add_unk_token_id(original.unk_id())
    writer.add_add_space_prefix(prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return read_gguf(path)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizers_give_the_ids_of_their_model(prefix: bool, tmp_path: Path) -> None:
    original = train_sentencepiece(prefix)
    tokenizer = build_tokenizer(sentencepiece_gguf(tmp_path / "t.gguf", original, prefix))
    bos, eos = original.bos_id(), original.eos_id()
    for text in [*CORPUS, "a <user> b", "ünknown ☃ and \x07"]:
        ids = tokenizer.encode(text, add_bos=False)
        assert ids == original.encode(text), text
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text) == [bos, *ids]
    assert tokenizer.encode("<s>hi</s>hi") == [bos, *original.encode("hi"), eos, *original.encode("hi")]
    assert tokenizer.eos_token_ids == {eos}


@pytest.mark.parametrize("missing", ["scores", "tokens"])
def test_a_vocabulary_without_its_parts_is_refused(missing: str, tmp_path: Path) -> None:
    file = sentencepiece_gguf(tmp_path / "t.gguf", train_sentencepiece(True), True)
    del file.metadata[f"tokenizer.ggml.{missing}"]
    with pytest.raises(ModelError, match=f"tokenizer.ggml.{missing} is missing"):
        build_tokenizer(file)


def test_an_unknown_kind_of_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    file = written_gguf(tmp_path / "t.gguf")
    file.metadata["tokenizer.ggml.model"] = "rwkv"
    with pytest.raises(ModelError, match="tokenizer kind 'rwkv' is not supported"):
        build_tokenizer(file)


def byte_level() -> Tokenizer:
    return Tokenizer.from_str(tiny_models.tokenizer_json())


def byte_fallback() -> Tokenizer:
    """A SentencePiece-like decoder in which every byte is a token."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {piece: 256 + index for index, piece in enumerate(["▁the", "▁", "a", "é", "▁▁", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


class GivesUp:
    """tokenizers.DecodeStream, which raises for good after some steps, as it does for some byte sequences."""

    def __init__(self, stream: object, after: int) -> None:
        self.stream, self.left = stream, after

    def step(self, tokenizer: Tokenizer, token: int) -> str | None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("Invalid prefix encountered")
        return self.stream.step(tokenizer, token)  # type: ignore[attr-defined,no-any-return]


@settings(max_examples=300, deadline=None)
@given(data=st.data(), kind=st.sampled_from(["bytes", "fallback"]), skip=st.booleans(), slow=st.booleans())
def test_a_stream_adds_up_to_the_whole_text_without_half_characters(
    data: st.DataObject, kind: str, skip: bool, slow: bool
) -> None:
    gives_up = data.draw(st.booleans())
    tokenizer = byte_level() if kind == "bytes" else byte_fallback()
    text = data.draw(st.text(max_size=12))
    if kind == "bytes":
        before = byte_level().encode(text).ids
        noise = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=6))
        at = data.draw(st.integers(0, len(before)))
        ids = before[:at] + noise + before[at:]
    else:  # a byte that makes no character spoils the whole run of bytes before it, so here all make one
        at = data.draw(st.integers(0, len(text)))
        noise = data.draw(st.lists(st.integers(256, tokenizer.get_vocab_size() - 1), max_size=6))
        ids = [*text[:at].encode(), *noise, *text[at:].encode()]
    decoder: SlowStreamDecoder | FastStreamDecoder
    if slow:
        decoder = SlowStreamDecoder(lambda some: str(tokenizer.decode(some, skip_special_tokens=skip)))
    else:
        decoder = FastStreamDecoder(tokenizer, skip)
        if gives_up:
            decoder._stream = GivesUp(decoder._stream, data.draw(st.integers(0, 4)))  # type: ignore[assignment]
    pieces = [decoder.push(token) for token in ids] + [decoder.finish()]
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) == whole
    if not noise:
        assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


def test_long_characters_wait_for_their_last_byte() -> None:
    decoder = FastStreamDecoder(byte_level(), True)
    ids = byte_level().encode("🙂").ids
    assert [decoder.push(token) for token in ids] == [""] * (len(ids) - 1) + ["🙂"]
    assert decoder.finish() == ""
    assert decoder.push(ids[0]) == ""
    assert decoder.finish() == "\ufffd"


def test_code_from_a_directory_is_not_run(tmp_path: Path) -> None:
    tiny_models.write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "strange"}')
    settings_file = tmp_path / "tokenizer_config.json"
    settings_file.write_text(
        json.dumps({"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}})
    )
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        load_directory_tokenizer(tmp_path, {})
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_without_a_fast_backend_works_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    tokenizer = load_directory_tokenizer(tmp_path, {})
    text = "naïve 🙂"
    ids = tokenizer.encode(text, add_bos=False)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    decoder = tokenizer.stream_decoder()
    assert "".join([decoder.push(token) for token in ids] + [decoder.finish()]) == text
    assert tokenizer.tags.tags == ()


def test_pre_tokenizers_keep_every_byte() -> None:
    for name, pre in PRE_TOKENIZERS.items():
        tokenizer = Tokenizer(
            models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
        )
        tokenizer.pre_tokenizer = pre.build()
        tokenizer.decoder = decoders.ByteLevel()
        codec = FastCodec(tokenizer)
        for text in CORPUS:
            assert codec.decode(codec.encode(text, special=False), skip_special_tokens=False) == text, name
