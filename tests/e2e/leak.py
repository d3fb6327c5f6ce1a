"""Does resident memory stay where it is? Many requests through one engine around a tiny random llama.

    python tests/e2e/leak.py [--requests 20000]

Prompts share prefixes, differ in length, fork, stop early and are cancelled, over a pool small enough to evict
and to preempt. Prints resident memory on the way; exits with 1 if it grew by 2% or more over the second half.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from mlxbatch.execution.backend import prepare_backend

prepare_backend()

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tiny_models import write_dir  # noqa: E402

from mlxbatch.config import EngineConfig  # noqa: E402
from mlxbatch.engine.local import LocalEngine  # noqa: E402
from mlxbatch.models import load  # noqa: E402
from mlxbatch.request import Request, SamplingParams  # noqa: E402

REPORTS = 10
KV_BYTES = 90_000  # little enough that rows are preempted


def resident_bytes() -> int:
    """What the system counts, not what Python or MLX believe."""
    command = ["ps", "-o", "rss=", "-p", str(os.getpid())]
    return 1024 * int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def request(number: int, numbers: random.Random, vocab: int) -> Request:
    shared = [3 + (7 * i) % (vocab - 3) for i in range(numbers.choice((0, 16, 40)))]
    own = [numbers.randrange(3, vocab) for _ in range(numbers.randint(1, 30))]
    params = SamplingParams(
        temperature=numbers.choice((0.0, 0.8)),
        seed=number,
        max_tokens=numbers.randint(1, 16),
        n=numbers.choice((1, 1, 1, 2)),
        top_k=numbers.choice((0, 20)),
        stop=("ab",) if number % 5 == 0 else (),
        logprobs=2 if number % 7 == 0 else None,
        ignore_eos=number % 3 == 0,
    )
    return Request(str(number), tuple(shared + own), params)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    total = parser.parse_args().requests
    numbers = random.Random(7)
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(str(write_dir("llama", Path(folder) / "llama")))
        config = EngineConfig(
            model=loaded.name, max_num_seqs=16, max_num_batched_tokens=128, block_size=8, kv_memory=KV_BYTES
        )
        engine = LocalEngine(config, loaded=loaded)
        vocab = engine.tokenizer.vocab_size
        seen: list[int] = []
        left: dict[str, int] = {}  # answers still to end, by request
        submitted = ended = 0
        while ended < total:
            while submitted < total and submitted - ended < 64:
                new = request(submitted, numbers, vocab)
                engine.submit(new)
                left[new.request_id] = new.params.n
                submitted += 1
                if submitted % 50 == 0:
                    engine.cancel(str(submitted - 1))
            for delta in engine.poll():
                left[delta.request_id] -= delta.finish_reason is not None
                if not left[delta.request_id]:
                    del left[delta.request_id]
                    ended += 1
            engine.pop_timings()
            if ended * REPORTS // total > len(seen):
                gc.collect()
                seen.append(resident_bytes())
                stats = engine.stats()
                print(
                    f"{ended:7,} requests: {seen[-1] / 1e6:7.1f} MB resident, "
                    f"{stats['preemptions']} preemptions",
                    flush=True,
                )
        engine.close()
    half, end = seen[REPORTS // 2 - 1], seen[-1]
    print(f"from half to the end: {100 * (end / half - 1):+.2f}%")
    return 0 if end < 1.02 * half else 1


if __name__ == "__main__":
    sys.exit(main())
