"""The requests that have not ended, and the sequences that answer them."""

from __future__ import annotations

from collections.abc import Iterable

from mlxbatch.errors import RequestError
from mlxbatch.request import Request
from mlxbatch.scheduling.groups import KVMemory
from mlxbatch.scheduling.sequence import Sequence, Status

_SEED_STEP = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads the seeds of forks


class UnfinishedRequests:
    """Refuses what can never run, makes the sequences of what can, and finds them by id until they end."""

    def __init__(
        self, kv: KVMemory, *, max_model_len: int, eos_token_ids: Iterable[int] = (), seed: int = 0
    ) -> None:
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.seed = seed
        self._kv = kv
        self._sequences: dict[int, Sequence] = {}
        self._of_request: dict[str, list[Sequence]] = {}
        self._next_id = 0

    def __len__(self) -> int:
        """Sequences, not requests."""
        return len(self._sequences)

    def get(self, seq_id: int) -> Sequence | None:
        return self._sequences.get(seq_id)

    def of_request(self, request_id: str) -> list[Sequence]:
        return [seq for seq in self._of_request.get(request_id, ()) if seq.status is not Status.FINISHED]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max((seq.num_tokens for seq in self._sequences.values()), default=0)

    def add(self, request: Request) -> list[Sequence]:
        """The `n` sequences of a request. Raises RequestError if it can never fit."""
        if request.request_id in self._of_request:
            raise RequestError(f"request id {request.request_id!r} is already in use", param="request_id")
        prompt, params = list(request.prompt_token_ids), request.params
        self.check_fits(len(prompt), params.max_tokens)
        limit = min(self.max_model_len, self._kv.max_tokens_alone()) - len(prompt)
        max_length = len(prompt) + min(limit, params.max_tokens or limit)
        sequences = []
        for index in range(params.n):
            resumed = list(request.resume_token_ids) if index == 0 else []
            seq = Sequence(
                seq_id=self._next_id,
                request=request,
                index=index,
                max_length=max_length,
                eos_token_ids=self.eos_token_ids,
                token_ids=prompt + resumed,
                num_prompt_tokens=len(prompt),
                seed=self._seed_of(request, index),
            )
            self._next_id += 1
            self._sequences[seq.seq_id] = seq
            sequences.append(seq)
        self._of_request[request.request_id] = list(sequences)
        return sequences

    def remove(self, seq: Sequence) -> None:
        """`seq` has finished; its request ends with the last of its sequences."""
        del self._sequences[seq.seq_id]
        if not self.of_request(seq.request.request_id):
            del self._of_request[seq.request.request_id]

    def check_fits(self, num_prompt: int, max_tokens: int | None) -> None:
        """Raise RequestError, with the arithmetic, if a request of these lengths can never run."""
        if not num_prompt:
            raise RequestError("the prompt has no tokens", code="empty_prompt", param="prompt")
        wanted = num_prompt + (max_tokens or 1)
        parts = f"{num_prompt} prompt tokens + {max_tokens or 1} new tokens = {wanted}"
        if wanted > self.max_model_len:
            raise RequestError(
                f"{parts}, but the context holds {self.max_model_len}. {_way_out(self.max_model_len, num_prompt)}.",
                code="context_length_exceeded",
                param="max_tokens" if num_prompt < self.max_model_len else "prompt",
            )
        room = self._kv.max_tokens_alone()
        if wanted > room:
            raise RequestError(
                f"{parts}, but the whole KV cache holds {room} ({self._kv.limit:,} bytes). "
                f"{_way_out(room, num_prompt)}, or raise --kv-memory.",
                code="kv_cache_exceeded",
                param="max_tokens" if num_prompt < room else "prompt",
            )

    def _seed_of(self, request: Request, index: int) -> int:
        base = request.params.seed
        if base is None:
            base = (self.seed + 1) * _SEED_STEP + self._next_id * 0xD1B54A32D192ED03
        return (base + index * _SEED_STEP) & 0xFFFFFFFFFFFFFFFF


def _way_out(room: int, num_prompt: int) -> str:
    if num_prompt < room:
        return f"Shorten the prompt or lower max_tokens to {room - num_prompt}"
    return f"Shorten the prompt to fewer than {room} tokens"
