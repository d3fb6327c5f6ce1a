"""Is the cap that `mlxbatch tune` chooses the right one? Measures, then runs batches at several caps.

    python tests/e2e/tune_sweep.py [--rounds 4] [--tokens 64] [--caps 8,16,24,32,48,64]

Prints S of two runs of `tune`, the cap, and the throughput at every cap. For an idle machine. In every round each cap
runs one batch that fills it exactly, so that a machine that slows down or speeds up meanwhile favours none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from mlxbatch.config import EngineConfig
from mlxbatch.engine.assembly import load_for
from mlxbatch.engine.local import LocalEngine
from mlxbatch.models.progress import once
from mlxbatch.request import Request, SamplingParams

PROMPT = 16


def tune(*flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "mlxbatch.cli.main", "tune", "--json", "-q", "--no-save", *flags]
    began = time.monotonic()
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(
        f"tune: {time.monotonic() - began:.0f} s, S {result['S']:.2f}, cap {result['cap']} ({result['cap_reason']})"
    )
    for point in result["decode"]:
        if point["context"] == min(p["context"] for p in result["decode"]):
            rows, seconds = point["rows"], point["seconds"]
            print(f"  {rows:3} rows {1e3 * seconds:8.1f} ms {rows / seconds:7.1f} tok/s")
    return result


def throughput(loaded: Any, cap: int, tokens: int) -> float:
    """Output tokens per second of a batch of `cap` requests, prefill included."""
    config = EngineConfig(max_num_seqs=cap, prefix_caching=False)
    engine = LocalEngine(config, loaded=loaded, tuned=False)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for number in range(cap):
        prompt = tuple((7919 * number + 31 * i) % 40_000 for i in range(PROMPT))
        engine.submit(Request(str(number), prompt, params))
    began = time.monotonic()
    while engine.has_unfinished:
        engine.poll()
    taken = time.monotonic() - began
    engine.close()
    return cap * tokens / taken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--caps", default="8,16,24,32,48,64")
    args = parser.parse_args()
    first, second = tune(), tune()
    print(f"second S differs by {100 * abs(second['S'] / first['S'] - 1):.1f}%")
    loaded = load_for(EngineConfig(), once(print))
    caps = sorted({*(int(c) for c in args.caps.split(",")), first["cap"], second["cap"]})
    throughput(loaded, max(caps), 4)  # warm up
    rounds = [{cap: throughput(loaded, cap, args.tokens) for cap in caps} for _ in range(args.rounds)]
    found = {cap: statistics.median(rates[cap] for rates in rounds) for cap in caps}
    best = max(found, key=lambda cap: found[cap])
    for cap, rate in found.items():
        share = statistics.median(rates[cap] / rates[best] for rates in rounds)
        mark = " <- cap" if cap == first["cap"] else ""
        print(f"max_num_seqs {cap:3}: {rate:7.1f} tok/s, {100 * share:5.1f}% of the best{mark}")


if __name__ == "__main__":
    main()
