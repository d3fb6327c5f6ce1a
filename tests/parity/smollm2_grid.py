"""The whole grid of limits on SmolLM2, against mlx-lm one sequence at a time. A script; a test holds a part of it.

    python tests/parity/smollm2_grid.py [--quick]

Every request's greedy tokens must equal mlx-lm's, with max_num_seqs 1, 4 and 16, token budgets from the least
allowed to 512, block sizes 8, 16 and 32, the prefix cache on and off, and a pool so small that rows are preempted.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mlxbatch.execution.backend import prepare_backend

prepare_backend()

from engine_run import run_engine, small_pool  # noqa: E402
from greedy_oracle import Comparison, greedy  # noqa: E402
from prompts_of_mixed_length import chat_prompts  # noqa: E402

from mlxbatch.models import load  # noqa: E402
from mlxbatch.request import SamplingParams  # noqa: E402

ROWS, BLOCKS = (1, 4, 16), (8, 16, 32)
LONG_ANSWER = 70  # two blocks of the largest size: what the small pool has no room for


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a ninth of the grid")
    parser.add_argument("--new-tokens", type=int, default=16)
    args = parser.parse_args()
    loaded = load("smollm2-135m")
    prompts = chat_prompts(loaded.tokenizer, 32)
    lengths = sorted(len(p) for p in prompts)
    print(f"{len(prompts)} prompts of {lengths[0]} to {lengths[-1]} tokens, {args.new_tokens} new tokens each")
    began = time.time()
    oracle = [greedy(loaded.model, prompt, args.new_tokens) for prompt in prompts]
    print(f"mlx-lm alone: {time.time() - began:.0f} s")
    short = sorted(prompts, key=len)[:8]
    long_oracle = [greedy(loaded.model, prompt, LONG_ANSWER) for prompt in short]
    total, failed = Comparison(), 0
    cases = []
    for rows, block, prefix in itertools.product(ROWS, BLOCKS, (True, False)):
        for budget in (rows + block, rows + block + 13, 188, 512):
            cases.append(
                {"max_num_seqs": rows, "max_num_batched_tokens": budget, "block_size": block, "prefix": prefix}
            )
    for block, prefix in itertools.product(BLOCKS, (True, False)):
        case = {"max_num_seqs": 16, "max_num_batched_tokens": 188, "block_size": block, "prefix": prefix}
        cases.append(case | {"small": True})
    for case in cases[:: 9 if args.quick else 1]:
        settings = {key: case[key] for key in ("max_num_seqs", "max_num_batched_tokens", "block_size")}
        settings["prefix_caching"] = case["prefix"]
        asked, wanted, new_tokens = prompts, oracle, args.new_tokens
        if case.get("small"):
            asked, wanted, new_tokens = short, long_oracle, LONG_ANSWER
            settings["kv_memory"] = small_pool(loaded, asked, new_tokens, **settings)
        began = time.time()
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        outputs, stats = run_engine(loaded, asked, params, **settings)
        comparison = Comparison()
        for number, (got, want) in enumerate(zip(outputs, wanted, strict=True)):
            comparison.add(f"prompt {number}", got, want)
        total.tokens += comparison.tokens
        total.ties += comparison.ties
        total.wrong += comparison.wrong
        failed += not comparison.ok or bool(case.get("small") and not stats["preemptions"])
        print(
            f"seqs {case['max_num_seqs']:2} budget {case['max_num_batched_tokens']:3} block {case['block_size']:2} "
            f"prefix {'on ' if case['prefix'] else 'off'} preemptions {stats['preemptions']:3}: "
            f"{comparison.tokens} tokens, {comparison.ties} ties, {comparison.wrong} wrong, "
            f"{time.time() - began:.0f} s",
            flush=True,
        )
    print(
        f"in all: {total.tokens} tokens compared, {total.ties} ties within 1e-3, {total.wrong} wrong, {failed} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
