"""The figures of a finished run: a table for people, JSON for --stats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from mlxbatch import __version__
from mlxbatch.batch.totals import PERCENTILES, RunTotals
from mlxbatch.errors import UsageError
from mlxbatch.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class RunReport:
    """`seconds` is the time from the first request to the last record, loading excluded; `load_seconds` is
    the loading, `first_token_seconds` from the start of the command to the first token of any answer. `engine` is
    what the engine counted, as `EngineClient.stats` gives it."""

    model: str
    totals: RunTotals
    seconds: float
    load_seconds: float
    first_token_seconds: float | None
    engine: Mapping[str, Any]
    interrupted: bool = False

    def as_dict(self) -> dict[str, Any]:
        totals = self.totals
        return {
            "version": __version__,
            "model": self.model,
            "seconds": self.seconds,
            "load_seconds": self.load_seconds,
            "first_token_seconds": self.first_token_seconds,
            "interrupted": self.interrupted,
            "requests": {
                "answered": totals.answered,
                "failed": totals.failed,
                "remaining": totals.remaining,
                "earlier_answers": totals.earlier_answers,
                "earlier_errors": totals.earlier_errors,
            },
            "tokens": {
                "prompt": totals.prompt_tokens,
                "prompt_cached": totals.cached_tokens,
                "output": totals.output_tokens,
            },
            "latency_seconds": {
                "ttft": totals.ttft.as_dict(),
                "tpot": totals.tpot.as_dict(),
                "queue": totals.queue_time.as_dict(),
            },
            "speed": {
                "prefill_tokens_per_second": self.engine.get("prefill_tokens_per_second"),
                "decode_tokens_per_second": self.engine.get("decode_tokens_per_second"),
                "output_tokens_per_second": totals.output_tokens / self.seconds if self.seconds else None,
            },
            "engine": dict(self.engine),
        }

    def write(self, path: Path) -> None:
        """Raises UsageError when the file cannot be written."""
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self.as_dict()), indent=2) + b"\n")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None

    def table(self) -> Table:
        table = Table(title=self.model, show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column()
        for name, value in self.rows():
            table.add_row(name, value)
        return table

    def rows(self) -> list[tuple[str, str]]:
        totals = self.totals
        requests = f"{totals.answered} answered, {totals.failed} failed"
        if totals.remaining:
            requests += f", {totals.remaining} not run"
        if earlier := totals.earlier_answers + totals.earlier_errors:
            requests += f"; {earlier} done earlier"
        rows = [
            ("requests", requests),
            ("time", self._times()),
            ("tokens", f"{totals.prompt_tokens:,} prompt, {totals.output_tokens:,} output"),
        ]
        if self.engine:
            prefill, decode = (self.engine[f"{name}_tokens_per_second"] for name in ("prefill", "decode"))
            rows.append(("speed", f"prefill {prefill:,.0f} tok/s   decode {decode:,.0f} tok/s"))
        for name, distribution in (
            ("TTFT", totals.ttft),
            ("TPOT", totals.tpot),
            ("queue", totals.queue_time),
        ):
            values = distribution.as_dict()
            if values["count"]:
                points = [f"p{p} {format_seconds(float(values[f'p{p}'] or 0))}" for p in PERCENTILES]
                rows.append((name, "   ".join(points)))
        return rows + (self._engine_rows() if self.engine else [])

    def _times(self) -> str:
        text = f"{format_seconds(self.seconds)}, and {format_seconds(self.load_seconds)} to load"
        if self.first_token_seconds is not None:
            text += f"; first token {format_seconds(self.first_token_seconds)} after the start"
        return text

    def _engine_rows(self) -> list[tuple[str, str]]:
        engine = self.engine
        block_bytes = engine["kv_budget_bytes"] / max(1, engine["kv_blocks_total"])
        hits, queries = engine["prefix_hit_tokens"], engine["prefix_query_tokens"]
        return [
            ("steps", f"{engine['steps']:,}, {engine['mean_rows_per_step']:.1f} rows on average"),
            (
                "KV peak",
                f"{engine['kv_peak_blocks']:,} of {engine['kv_blocks_total']:,} blocks, "
                f"{format_bytes(engine['kv_peak_blocks'] * block_bytes)}"
                + (" (the engine's, from before this run)" if engine.get("kv_peak_is_older") else ""),
            ),
            ("unused tail", f"{engine['mean_unused_tail_tokens']:.0f} tokens on average"),
            ("prefix hits", f"{hits:,} of {queries:,} tokens" + (f" ({hits / queries:.0%})" if queries else "")),
            ("preemptions", f"{engine['preemptions']:,}"),
        ]
