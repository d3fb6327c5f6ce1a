"""mlx-lm alone, one sequence at a time: the tokens that the engine must give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

TIE = 1e-3  # mlx-lm's two best logits this close: rounding may decide


@dataclass(frozen=True)
class OracleAnswer:
    """`gaps[i]` is the difference of the two best logits at token i."""

    token_ids: list[int]
    gaps: list[float]


def greedy(model: Any, prompt: Sequence[int], max_tokens: int, eos: frozenset[int] = frozenset()) -> OracleAnswer:
    """Greedy tokens of mlx-lm's own generate_step, until EOS (included) or max_tokens."""
    tokens, gaps = [], []
    for token, logprobs in generate_step(mx.array(list(prompt)), model, max_tokens=max_tokens):
        best = mx.topk(logprobs.reshape(-1).astype(mx.float32), 2)
        gaps.append(abs(float((best[0] - best[1]).item())))
        tokens.append(int(token))
        if tokens[-1] in eos:
            break
    return OracleAnswer(tokens, gaps)


@dataclass
class Comparison:
    """Compares answers up to the first difference: after it the contexts differ."""

    tokens: int = 0
    ties: int = 0
    wrong: int = 0

    def add(self, name: str, got: Sequence[int], oracle: OracleAnswer) -> None:
        for at, (mine, theirs) in enumerate(zip(got, oracle.token_ids, strict=False)):
            self.tokens += 1
            if mine != theirs:
                tie = oracle.gaps[at] < TIE
                self.ties += tie
                self.wrong += not tie
                word = "tie" if tie else "WRONG"
                print(f"  {word}: {name} token {at}: {mine} for {theirs}, gap {oracle.gaps[at]:.2e}")
                return
        if len(got) != len(oracle.token_ids):
            self.wrong += 1
            print(f"  WRONG: {name} has {len(got)} tokens for {len(oracle.token_ids)}")

    @property
    def ok(self) -> bool:
        return self.wrong == 0 and self.ties * 1000 <= max(self.tokens, 1000)
