"""Is the cap that `mlxbatch tune` chooses the right one? Measures, then runs one batch at several caps.

    python tests/e2e/tune_sweep.py [--requests 192] [--tokens 24] [--caps 8,16,24,32,48,64]

Prints S of two runs of `tune`, the cap, and the throughput at every cap. For an idle machine. The number of requests
is a multiple of every cap, so that no cap ends with a batch that is half empty. The caps run upwards, then downwards,
so that a machine that slows down or speeds up meanwhile favours none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from mlxbatch.config import EngineConfig
from mlxbatch.engine.assembly import load_for
from mlxbatch.engine.local import LocalEngine
from mlxbatch.models.progress import once
from mlxbatch.request import Request, SamplingParams


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


def seconds_of_a_batch(loaded: Any, cap: int, requests: int, tokens: int) -> float:
    """Seconds of a whole batch, prefill included."""
    config = EngineConfig(max_num_seqs=cap, prefix_caching=False)
    engine = LocalEngine(config, loaded=loaded, tuned=False)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for number in range(requests):
        prompt = tuple((7919 * number + 31 * i) % 40_000 for i in range(16))
        engine.submit(Request(str(number), prompt, params))
    began = time.monotonic()
    while engine.has_unfinished:
        engine.poll()
    taken = time.monotonic() - began
    engine.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--caps", default="8,16,24,32,48,64")
    args = parser.parse_args()
    first, second = tune(), tune()
    print(f"second S differs by {100 * abs(second['S'] / first['S'] - 1):.1f}%")
    loaded = load_for(EngineConfig(), once(print))
    caps = sorted({*(int(c) for c in args.caps.split(",")), first["cap"]})
    taken = {cap: 0.0 for cap in caps}
    for cap in [*caps, *reversed(caps)]:
        taken[cap] += seconds_of_a_batch(loaded, cap, args.requests, args.tokens)
    found = {cap: 2 * args.requests * args.tokens / seconds for cap, seconds in taken.items()}
    best = max(found.values())
    for cap, rate in found.items():
        mark = " <- cap" if cap == first["cap"] else ""
        print(f"max_num_seqs {cap:3}: {rate:7.1f} tok/s, {100 * rate / best:5.1f}% of the best{mark}")


if __name__ == "__main__":
    main()
