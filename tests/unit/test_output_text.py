from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from letter_tokenizer import FIRST_HALF, SECOND_HALF, LetterTokenizer

from mlxbatch.engine.output_text import OutputText


def run(text: str, stops: list[str], *, include: bool = False) -> tuple[str, str | None, list[str]]:
    tokenizer = LetterTokenizer()
    output = OutputText(tokenizer.stream_decoder(), stops, include_stop=include)
    pieces = []
    for token_id in tokenizer.encode(text):
        pieces.append(output.push(token_id))
        if output.found_stop is not None:
            return "".join(pieces), output.found_stop, pieces
    last = output.finish()
    return "".join([*pieces, last]), output.found_stop, pieces


def test_the_earliest_stop_string_wins_and_the_longest_at_one_place():
    assert run("xxabcdyy", ["cd", "abc"])[:2] == ("xx", "abc")
    assert run("xxab", ["ab", "b"])[:2] == ("xx", "ab")
    assert run("xxabyy", ["ab"], include=True)[:2] == ("xxab", "ab")


def test_text_is_held_back_only_while_it_may_become_a_stop_string():
    text, stop, pieces = run("aabaac", ["aab!"])
    assert (text, stop) == ("aabaac", None)
    assert pieces[:2] == ["", ""]
    assert run("aab", ["ab"])[:2] == ("a", "ab")


@given(st.text("ab", max_size=20), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_streaming_equals_searching_the_whole_text(text, stops):
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text
    if found:
        first_end = min(end for end, _ in found)  # the stop that is complete first ends the stream
        expected = text[: min(text.find(s) for s in stops if s in text[:first_end])]
    assert run(text, stops)[0] == expected


def test_half_a_character_is_never_given_out():
    output = OutputText(LetterTokenizer().stream_decoder(), ["é!"])
    assert output.push(FIRST_HALF) == ""
    assert output.push(SECOND_HALF) == ""  # may still become the stop string
    assert output.push(1) == "éa"
