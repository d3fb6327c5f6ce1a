"""kill -9 the engine process during its streams, again and again: every stream completes, and its text equals the
undisturbed one.

    python tests/e2e/kill_engine.py --kills 20                    SmolLM2-135M, 8 greedy streams
    python tests/e2e/kill_engine.py --kills 20 --model tiny       a tiny random llama, whose text is mostly broken
                                                                  characters: none may be lost or doubled either
    python tests/e2e/kill_engine.py --kills 20 --client async     the client of the chat application

Each round starts all streams anew and kills the engine once, after a random number of tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlxbatch.config import EngineConfig
from mlxbatch.process.async_client import AsyncEngineClient
from mlxbatch.process.client import ProcessEngine
from mlxbatch.process.control import stop_engine
from mlxbatch.process.launcher import Launcher
from mlxbatch.process.messages import Submit, params_to_wire
from mlxbatch.process.paths import RuntimeDir
from mlxbatch.process.registry import Registry
from mlxbatch.request import OutputDelta, Request, SamplingParams

PROMPTS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "List ten animals, one on each line.",
    "Erkläre auf Deutsch, was ein Akku ist.",
    "Explain what a hash table is, with an example.",
    "Write a poem of four lines about rain.",
    "Give me a table of five countries and their capitals, with flags 🇫🇷.",
    "Count from one to twenty in words.",
)


@dataclass
class Answer:
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, delta: OutputDelta) -> None:
        if self.finish_reason is not None:
            raise SystemExit("a delta came after the last one")
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason


Answers = dict[str, Answer]
OnTokens = Callable[[int], None]  # told how many tokens all streams have together


@dataclass(frozen=True)
class Stream:
    request_id: str
    prompt: str
    params: SamplingParams

    @property
    def messages(self) -> list[dict[str, object]]:
        return [{"role": "user", "content": self.prompt}]


def streams(count: int, tokens: int) -> list[Stream]:
    """Greedy requests of several kinds: to the length, to the model's end, to a stop string."""
    kinds = (
        SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=tokens),
        SamplingParams(temperature=0, max_tokens=tokens, stop=[". ", "\n\n", "ll"], min_tokens=tokens // 4),
    )
    return [Stream(f"stream-{n}", PROMPTS[n % len(PROMPTS)], kinds[n % len(kinds)]) for n in range(count)]


def run_sync(engine: ProcessEngine, wanted: Sequence[Stream], on_tokens: OnTokens) -> Answers:
    for stream in wanted:
        ids = tuple(engine.tokenizer.encode_chat(stream.messages))
        engine.submit(Request(stream.request_id, ids, stream.params))
    answers = {stream.request_id: Answer() for stream in wanted}
    while engine.has_unfinished:
        for delta in engine.poll(5.0):
            answers[delta.request_id].take(delta)
        on_tokens(sum(len(answer.token_ids) for answer in answers.values()))
    return answers


async def run_async(client: AsyncEngineClient, wanted: Sequence[Stream], on_tokens: OnTokens) -> Answers:
    for stream in wanted:
        params = params_to_wire(stream.params)
        await client.submit(Submit(request_id=stream.request_id, messages=stream.messages, params=params, priority=0))
    answers = {stream.request_id: Answer() for stream in wanted}
    async for event in client.events():
        if isinstance(event, OutputDelta):
            answers[event.request_id].take(event)
            on_tokens(sum(len(answer.token_ids) for answer in answers.values()))
        if all(answer.finish_reason is not None for answer in answers.values()):
            return answers
    raise SystemExit("the events ended early")


def rounds(launcher: Launcher, wanted: Sequence[Stream], kind: str) -> Iterator[Callable[[int | None], Answers]]:
    """Yields, for ever, a function that runs all streams and kills the engine once `kill_at` tokens are there."""
    with asyncio.Runner() as runner:
        sync = ProcessEngine(launcher, kind="chat") if kind == "sync" else None
        interface = AsyncEngineClient(launcher) if kind == "async" else None
        if interface is not None:
            runner.run(interface.start())

        def run(kill_at: int | None) -> Answers:
            killed = kill_at is None

            def on_tokens(count: int) -> None:
                nonlocal killed
                if not killed and kill_at is not None and count >= kill_at:
                    killed = True
                    client = sync or interface
                    assert client is not None
                    os.kill(client.engine_pid, signal.SIGKILL)

            if sync is not None:
                answers = run_sync(sync, wanted, on_tokens)
            else:
                assert interface is not None
                answers = runner.run(run_async(interface, wanted, on_tokens))
            if not killed:
                raise SystemExit(f"the streams ended before {kill_at} tokens")
            return answers

        try:
            while True:
                yield run
        finally:
            if sync is not None:
                sync.close()
            if interface is not None:
                runner.run(interface.close())


def differences(found: Answers, expected: Mapping[str, Answer]) -> list[str]:
    return [name for name in expected if found.get(name) != expected[name]]


def tiny_model(folder: Path) -> str:
    from mlxbatch.execution.backend import prepare_backend

    prepare_backend()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tiny_models import write_dir

    write_dir("llama", folder / "model")
    return str(folder / "model")


def kill_rounds(
    model: str,
    folder: Path,
    *,
    kills: int,
    count: int = 8,
    tokens: int = 48,
    kind: str = "sync",
    seed: int = 0,
    tell: Callable[[str], None] = print,
) -> None:
    """Ends the script at the first difference."""
    runtime = RuntimeDir(folder / "run", folder / "logs").prepared()
    launcher = Launcher(EngineConfig(model=model, max_num_seqs=count), runtime=runtime)
    wanted = streams(count, tokens)
    generator = random.Random(seed)
    try:
        turns = rounds(launcher, wanted, kind)
        began = time.monotonic()
        expected = next(turns)(None)
        total = sum(len(answer.token_ids) for answer in expected.values())
        tell(f"undisturbed: {total} tokens in {count} streams, {time.monotonic() - began:.1f} s")
        for number in range(1, kills + 1):
            kill_at = generator.randrange(1, total)
            began = time.monotonic()
            found = next(turns)(kill_at)
            wrong = differences(found, expected)
            if wrong:
                name = wrong[0]
                raise SystemExit(f"kill {number}: {wrong} differ\n{expected[name]}\n{found[name]}")
            seconds = time.monotonic() - began
            tell(f"kill {number}/{kills} at {kill_at} of {total} tokens: all {count} texts equal, {seconds:.1f} s")
        turns.close()
    finally:
        for record in Registry(runtime).live():
            stop_engine(record, runtime, force=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--model", default="smollm2-135m", help="as for -m, or tiny")
    parser.add_argument("--client", choices=("sync", "async"), default="sync")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxb-") as name:
        kill_rounds(
            tiny_model(Path(name)) if options.model == "tiny" else options.model,
            Path(name),
            kills=options.kills,
            count=options.streams,
            tokens=options.tokens,
            kind=options.client,
            seed=options.seed,
            tell=lambda line: print(line, flush=True),
        )
    print(f"{options.kills} kills: no stream lost, no text lost or doubled")


if __name__ == "__main__":
    main()
