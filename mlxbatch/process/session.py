"""What a client remembers of its requests, so that the death of an engine loses no text. No I/O here.

Each streamed Delta holds whole engine steps: tokens, and the text that the engine's detokenizer released for
exactly these tokens. So after a crash a client that holds k tokens holds the text that belongs to k tokens.
Two ways to go on, on a new engine or after a lost connection:

    resume   the engine counts the k tokens as output and streams only what follows     (one answer)
    replay   the engine streams from the start, and this side skips what it already has (n answers,
             or a request that an engine kept running while its client was away)
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from mlxbatch.process.messages import Accepted, Delta, Submit
from mlxbatch.request import OutputDelta


@dataclass(slots=True)
class OutputProgress:
    """What the caller has been given of one answer, and how much of a replay is still to be skipped."""

    token_ids: list[int] = field(default_factory=list)
    text_length: int = 0
    finished: bool = False
    skip_tokens: int = 0
    skip_text: int = 0

    def rewind(self) -> None:
        self.skip_tokens = len(self.token_ids)
        self.skip_text = self.text_length

    def take(self, delta: OutputDelta) -> OutputDelta | None:
        """The part of `delta` that the caller does not have yet; None when there is none."""
        if self.finished:
            return None
        if self.skip_tokens or self.skip_text:
            return self._take_replayed(delta)
        self.token_ids.extend(delta.token_ids)
        self.text_length += len(delta.text)
        self.finished = delta.finish_reason is not None
        return delta

    def _take_replayed(self, delta: OutputDelta) -> OutputDelta | None:
        known = len(self.token_ids) - self.skip_tokens
        skipped = min(self.skip_tokens, len(delta.token_ids))
        if tuple(self.token_ids[known : known + skipped]) != delta.token_ids[:skipped]:
            # Only rounding that depends on the batch can do this; half an answer of each would be wrong.
            self.finished = True
            return msgspec.structs.replace(
                delta,
                token_ids=(),
                text="",
                logprobs=(),
                finish_reason="error",
                error="the engine was restarted and this answer came out differently; run the request again",
            )
        skipped_text = min(self.skip_text, len(delta.text))
        self.skip_tokens -= skipped
        self.skip_text -= skipped_text
        rest = msgspec.structs.replace(
            delta,
            token_ids=delta.token_ids[skipped:],
            text=delta.text[skipped_text:],
            logprobs=delta.logprobs[skipped:],
        )
        self.token_ids.extend(rest.token_ids)
        self.text_length += len(rest.text)
        self.finished = rest.finish_reason is not None
        return rest if rest.token_ids or rest.text or rest.finish_reason is not None else None


@dataclass(slots=True)
class TrackedRequest:
    """One unfinished request of this client."""

    submit: Submit
    outputs: dict[int, OutputProgress]
    prompt_token_ids: list[int] | None = None
    cancelled: bool = False

    @property
    def n(self) -> int:
        return len(self.outputs)

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs.values())


class Session:
    """All unfinished requests of one client.

    Requests that sample without a seed of their own are given one: made of `seed` and the request's id, so
    that a batch run repeats itself, or a random one if `seed` is None, so that a chat does not.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._requests: dict[str, TrackedRequest] = {}
        self._seed = seed

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def request_ids(self) -> list[str]:
        return list(self._requests)

    def start(self, submit: Submit) -> Submit:
        """Remember a request; returns it as it is to be sent. The seed is settled here, not in the engine, so
        that the same tokens follow on another engine."""
        params = submit.params
        if params.get("seed") is None and params.get("temperature", 1.0) != 0:
            seed = self._seed_of(submit.request_id)
            submit = msgspec.structs.replace(submit, params={**params, "seed": seed})
        outputs = {index: OutputProgress() for index in range(int(params.get("n", 1)))}
        if submit.resume_token_ids and 0 in outputs:
            outputs[0].token_ids.extend(submit.resume_token_ids)
        self._requests[submit.request_id] = TrackedRequest(submit, outputs, submit.prompt_token_ids)
        return submit

    def _seed_of(self, request_id: str) -> int:
        if self._seed is None:
            return secrets.randbits(62)
        digest = hashlib.sha256(f"{self._seed}/{request_id}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 2

    def accepted(self, message: Accepted) -> None:
        request = self._requests.get(message.request_id)
        if request is None:
            return
        if message.prompt_token_ids:
            request.prompt_token_ids = message.prompt_token_ids
        if message.adopted:
            self._rewind(request)

    def cancel(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None:
            request.cancelled = True

    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def receive(self, deltas: Iterable[Delta]) -> list[OutputDelta]:
        """What the caller gets of a frame of deltas. Finished requests are forgotten."""
        news = []
        for wire in deltas:
            request = self._requests.get(wire.request_id)
            output = request.outputs.get(wire.index) if request is not None else None
            if request is None or output is None:
                continue
            delta = output.take(wire.to_output())
            if delta is not None:
                news.append(delta)
            if request.finished:
                self.forget(wire.request_id)
        return news

    def resubmissions(self) -> tuple[list[Submit], list[OutputDelta]]:
        """After a lost connection: what to send again, and the ends of requests that were being cancelled."""
        submits: list[Submit] = []
        ended: list[OutputDelta] = []
        for request in list(self._requests.values()):
            if request.cancelled:
                self.forget(request.submit.request_id)
                ended += _ended(request, "abort")
            else:
                submits.append(self._again(request))
        return submits, ended

    def fail(self, request_id: str, error: str) -> list[OutputDelta]:
        """End one request, refused after it had been accepted."""
        request = self._requests.pop(request_id, None)
        return _ended(request, "error", error) if request is not None else []

    def fail_all(self, error: str) -> list[OutputDelta]:
        """End every request, when there will be no engine to go on with."""
        requests, self._requests = self._requests, {}
        return [delta for request in requests.values() for delta in _ended(request, "error", error)]

    def _again(self, request: TrackedRequest) -> Submit:
        known = request.prompt_token_ids
        if request.n > 1:
            self._rewind(request)
            return msgspec.structs.replace(request.submit, prompt_token_ids=known)
        output = request.outputs[0]
        output.skip_tokens = output.skip_text = 0
        return msgspec.structs.replace(
            request.submit, prompt_token_ids=known, resume_token_ids=list(output.token_ids)
        )

    @staticmethod
    def _rewind(request: TrackedRequest) -> None:
        for output in request.outputs.values():
            output.rewind()


def _ended(request: TrackedRequest, reason: str, error: str | None = None) -> list[OutputDelta]:
    """The last deltas of what is unfinished of a request."""
    return [
        OutputDelta(request.submit.request_id, index, (), "", finish_reason=reason, error=error)
        for index, output in request.outputs.items()
        if not output.finished
    ]
