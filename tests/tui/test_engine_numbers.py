"""The engine screen beside the real engine: what it shows is what the engine's own `stats()` count."""

from __future__ import annotations

import re
from pathlib import Path

from tiny_models import write_dir

from mlxbatch.config import EngineConfig
from mlxbatch.engine.local import LocalEngine
from mlxbatch.request import Priority, Request, SamplingParams
from mlxbatch.tui.engine.frame import engine_frame
from mlxbatch.tui.engine.view_state import ViewState
from mlxbatch.tui.numbers import count, percent


def shown(text: str, pattern: str) -> tuple[int, ...]:
    """The numbers that a pattern finds, without the blanks between thousands."""
    found = re.search(pattern, text)
    assert found is not None, f"{pattern} is not on the screen:\n{text}"
    return tuple(int(group.replace(" ", "")) for group in found.groups())


def compare(engine: LocalEngine) -> dict[str, object]:
    stats, snapshot = engine.stats(), engine.snapshot()
    text = "\n".join(line.text for line in engine_frame(snapshot, ViewState(), 120, 36).lines)

    number = r"(\d[\d ]*)"
    assert shown(text, rf"KV blocks {number} of {number} in use") == (
        stats["kv_blocks_used"],
        snapshot.pools[0].total_blocks - 1,
    )
    shared, own, cached, free = shown(text, rf"{number} shared · {number} own · {number} cached · {number} free")
    assert shared + own == stats["kv_blocks_used"]
    assert cached == stats["kv_blocks_cached"]
    assert shared + own + cached + free == stats["kv_blocks_total"]
    assert shown(text, rf"tails {number} of") == (stats["kv_tail_tokens"],)
    assert shown(text, rf"batch {number}/{number}") == (stats["rows"], stats["max_num_seqs"])
    assert shown(text, rf"waiting {number}") == (stats["waiting"],)
    assert shown(text, rf"done {number} · steps {number}") == (stats["requests_finished"], stats["steps"])
    assert shown(text, rf"preempt {number}") == (stats["preemptions"],)
    hits = percent(float(str(stats["prefix_hit_tokens"])), float(str(stats["prefix_query_tokens"])))
    assert f"prefix hits {hits}" in text

    # The map holds the very blocks that are counted.
    drawn = "".join(line[2:74] for line in text.splitlines() if line.startswith("│ ") and "││" in line)
    if "1 cell = 1 block " in text:
        field = text[text.index("╭─ KV blocks") : text.index("1-9 slot")]
        marks = "".join(line[2:74] for line in field.splitlines()[1:])
        assert marks.count("◆") == shared
        assert marks.count("░") == cached
        assert len(re.findall(r"[1-9]", marks)) == own
    # A row for each sequence, with its tokens.
    for slot in snapshot.slots:
        figures = (
            (slot.output_tokens, slot.max_tokens)
            if slot.phase == "decode"
            else (
                slot.computed_tokens,
                slot.target_tokens,
            )
        )
        assert f"{figures[0]}/{figures[1]}" in drawn
    assert count(snapshot.counters.steps) in text
    return stats


def test_the_screen_shows_the_engines_own_numbers(tmp_path: Path) -> None:
    """Shared prefixes, eviction and preemption in a pool of 40 blocks, compared after every few steps."""
    model = write_dir("llama", tmp_path / "model")
    probe = LocalEngine(EngineConfig(model=str(model), block_size=8))
    block = probe.snapshot().pools[0].bytes_per_block
    probe.close()
    engine = LocalEngine(
        EngineConfig(model=str(model), block_size=8, max_num_seqs=4, max_num_batched_tokens=64, kv_memory=40 * block)
    )
    compare(engine)
    prefix = tuple(range(5, 45))
    for number in range(8):
        prompt = prefix + tuple(range(60 + number, 90 + number * 2))
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        engine.submit(Request(str(number), prompt, params, Priority.BATCH))
    steps = 0
    while engine.has_unfinished:
        engine.poll()
        steps += 1
        if steps % 5 == 0:
            compare(engine)
    stats = compare(engine)
    engine.close()
    assert stats["requests_finished"] == 8
    assert stats["preemptions"], "the pool was to be too small"
    assert stats["prefix_hit_tokens"]
    assert stats["rows"] == 0
