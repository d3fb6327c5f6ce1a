"""A client's memory of its requests: no text is lost or doubled by the death of an engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxbatch.process.messages import Accepted, Delta, Submit
from mlxbatch.process.session import Session
from mlxbatch.request import OutputDelta

ANSWER = list(range(100, 130))


def piece(start: int, end: int, request_id: str = "r", index: int = 0, answer: list[int] = ANSWER) -> Delta:
    """Tokens [start, end) of an answer. Every third token completes the text of three, as characters do."""
    text = "".join(f"<{answer[i - 2]}{answer[i - 1]}{answer[i]}>" for i in range(start, end) if i % 3 == 2)
    reason = "length" if end == len(answer) else None
    return Delta(request_id=request_id, index=index, token_ids=answer[start:end], text=text, finish_reason=reason)


WHOLE = piece(0, len(ANSWER))


def start(session: Session, n: int = 1, **fields: object) -> Submit:
    params = {"temperature": 0, "max_tokens": len(ANSWER), "n": n}
    return session.start(Submit(request_id="r", prompt="p", params=params, **fields))  # type: ignore[arg-type]


def joined(deltas: list[OutputDelta]) -> tuple[list[int], str]:
    return [token for delta in deltas for token in delta.token_ids], "".join(delta.text for delta in deltas)


@given(st.lists(st.integers(0, len(ANSWER) - 1), max_size=5), st.lists(st.integers(1, 7), min_size=40, max_size=40))
def test_resume_after_any_number_of_deaths(deaths: list[int], sizes: list[int]) -> None:
    session = Session()
    start(session)
    session.accepted(Accepted(request_id="r", prompt_token_ids=[1, 2]))
    got: list[OutputDelta] = []
    position = 0
    for death in [*sorted(deaths), len(ANSWER)]:
        while position < death:
            end = min(death, position + sizes[position])
            got += session.receive([piece(position, end)])
            position = end
        if death < len(ANSWER):
            (submit,), ended = session.resubmissions()
            assert not ended
            assert submit.prompt_token_ids == [1, 2]
            assert submit.resume_token_ids == ANSWER[:position]
    assert joined(got) == (ANSWER, WHOLE.text)
    assert got[-1].finish_reason == "length" and len(session) == 0


@given(st.integers(0, len(ANSWER) - 1), st.lists(st.integers(1, 7), min_size=40, max_size=40))
def test_replay_skips_what_is_there(known: int, sizes: list[int]) -> None:
    session = Session()
    start(session, orphan="continue")
    got = session.receive([piece(0, known)]) if known else []
    session.resubmissions()
    session.accepted(Accepted(request_id="r", adopted=True))
    position = 0
    while position < len(ANSWER):
        end = min(len(ANSWER), position + sizes[position])
        got += session.receive([piece(position, end)])
        position = end
    assert joined(got) == (ANSWER, WHOLE.text)
    assert len(session) == 0


def test_several_answers_are_run_again_and_each_skips_its_own() -> None:
    session = Session()
    start(session, n=2)
    got = session.receive([piece(0, 10, index=0), piece(0, 30, index=1)])
    (submit,), _ = session.resubmissions()
    assert submit.resume_token_ids == []
    got += session.receive([piece(0, 5, index=0), piece(0, 30, index=1)])
    got += session.receive([piece(5, 30, index=0)])
    assert joined([delta for delta in got if delta.index == 0]) == (ANSWER, WHOLE.text)
    assert joined([delta for delta in got if delta.index == 1]) == (ANSWER, WHOLE.text)
    assert len(session) == 0


def test_an_answer_that_comes_out_differently_is_an_error_not_a_mixture() -> None:
    session = Session()
    start(session, n=2)
    session.receive([piece(0, 10)])
    session.resubmissions()
    other = [7, *ANSWER[1:]]
    (delta,) = session.receive([piece(0, 12, answer=other)])
    assert delta.finish_reason == "error" and delta.error is not None and "differently" in delta.error
    assert delta.token_ids == () and delta.text == ""
    assert session.receive([piece(12, 20, answer=other)]) == []


def test_sampled_requests_get_a_seed_that_survives() -> None:
    submit = Submit(request_id="r", prompt="p", params={"temperature": 0.7})
    seeded = [Session(seed=0).start(submit).params["seed"] for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert Session(seed=1).start(submit).params["seed"] != seeded[0]
    assert Session().start(submit).params["seed"] != Session().start(submit).params["seed"]
    session = Session()
    first = session.start(submit)
    (again,), _ = session.resubmissions()
    assert again.params == first.params
    assert Session().start(Submit(request_id="r", params={"temperature": 0.7, "seed": 5})).params["seed"] == 5
    assert "seed" not in Session().start(Submit(request_id="r", params={"temperature": 0})).params


def test_cancelled_requests_end_instead_of_being_sent_again() -> None:
    session = Session()
    start(session)
    session.receive([piece(0, 4)])
    session.cancel("r")
    submits, (end,) = session.resubmissions()
    assert not submits and end.finish_reason == "abort" and len(session) == 0


def test_deltas_of_unknown_or_finished_requests_are_dropped() -> None:
    session = Session()
    start(session)
    assert session.receive([piece(0, 3, request_id="other"), piece(0, 3, index=4)]) == []
    session.receive([WHOLE])
    assert session.receive([piece(0, 3)]) == []


def test_failing_all_ends_each_output_once() -> None:
    session = Session()
    start(session, n=2)
    session.receive([piece(0, 30, index=0)])
    (end,) = session.fail_all("no engine")
    assert (end.index, end.finish_reason, end.error) == (1, "error", "no engine")
    assert session.fail("r", "again") == [] and len(session) == 0


def test_a_request_that_came_with_resume_tokens_keeps_them() -> None:
    session = Session()
    start(session, resume_token_ids=ANSWER[:6])
    session.receive([piece(6, 9)])
    (submit,), _ = session.resubmissions()
    assert submit.resume_token_ids == ANSWER[:9]
