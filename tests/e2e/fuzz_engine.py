"""Throw bytes at an engine's socket: noise, truncated and damaged frames, wrong versions, wrong fields, messages in
the wrong order. Beside it a well-behaved client must get every answer, whole and right, and the engine must not die,
log an internal error, or keep a slot or a connection.

    python tests/e2e/fuzz_engine.py --attacks 3000                 an engine process with a scripted engine
    python tests/e2e/fuzz_engine.py --attacks 500 --model tiny     the real engine with a tiny random llama
"""

from __future__ import annotations

import argparse
import random
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec
from process_harness import scripted_launcher

from mlxbatch.config import EngineConfig
from mlxbatch.process import frames
from mlxbatch.process.client import ProcessEngine
from mlxbatch.process.control import stop_engine
from mlxbatch.process.launcher import Launcher
from mlxbatch.process.link import hello
from mlxbatch.process.messages import (
    PROTOCOL,
    Cancel,
    Decode,
    Encode,
    EncodeChat,
    GiveWay,
    Message,
    Ping,
    Progress,
    SnapshotRequest,
    StatsRequest,
    Submit,
    Subscribe,
)
from mlxbatch.process.paths import RuntimeDir
from mlxbatch.process.registry import Registry
from mlxbatch.request import Request, SamplingParams

Attack = Callable[[random.Random], bytes]
ODD_NUMBERS = (-1, 0, 2**31, 2**63, -(2**63), 1e308, float("nan"), float("inf"))
ODD = (*ODD_NUMBERS, None, True, "", "x" * 5000, [], [[]], [None], {}, {"a": {}}, {1: 2}, b"\xff")


def framed(payload: bytes) -> bytes:
    return frames.HEADER.pack(len(payload)) + payload


def greeting() -> bytes:
    return frames.encode(hello("chat", "fuzz"))


def a_message(generator: random.Random) -> Message:
    number = generator.randrange(1000)
    return generator.choice(
        [
            Submit(request_id=f"f{number}", prompt="fuzz", params={"max_tokens": generator.randrange(1, 300)}),
            Submit(request_id=f"f{number}", messages=[{"role": "user", "content": "x"}], orphan="continue"),
            Submit(request_id="", prompt_token_ids=[generator.randrange(400) for _ in range(5)], priority=0),
            Cancel(request_id=f"f{number}"),
            Cancel(request_id=f"c{number}/f1", anyones=generator.random() < 0.1),
            Subscribe(rate=generator.choice([0, 4, 1e9, -1.0, float("nan")])),
            Encode(call=number, text="x" * number),
            EncodeChat(call=number, messages=[{"role": "user", "content": "x"}]),
            Decode(call=number, token_ids=[1, 2, 10**6, -5]),
            StatsRequest(call=number),
            SnapshotRequest(call=number),
            Ping(call=number),
            Progress(done=generator.choice([0, -5, 2**63]), total=generator.choice([0, -1, 7])),
            GiveWay(call=number, bytes=generator.choice([0, -(2**62), 10**6, 2**63]), evict=generator.random() < 0.5),
        ]
    )


def noise(generator: random.Random) -> bytes:
    return generator.randbytes(generator.randrange(1, 3000))


def noise_in_a_frame(generator: random.Random) -> bytes:
    return greeting() + framed(generator.randbytes(generator.randrange(200)))


def huge_length(generator: random.Random) -> bytes:
    return struct.pack(">I", generator.randrange(frames.HELLO_FRAME + 1, 2**32)) + noise(generator)


def truncated(generator: random.Random) -> bytes:
    data = greeting() + b"".join(frames.encode(a_message(generator)) for _ in range(generator.randrange(1, 5)))
    return data[: generator.randrange(len(data))]


def damaged(generator: random.Random) -> bytes:
    data = bytearray(greeting() + frames.encode(a_message(generator)))
    for _ in range(generator.randrange(1, 4)):
        data[generator.randrange(len(data))] = generator.randrange(256)
    return bytes(data)


def wrong_version(generator: random.Random) -> bytes:
    fields = {"type": "hello", "protocol": generator.choice([0, 1, 10**9, -1, "1", None, PROTOCOL]), "version": "9.9"}
    fields["kind"] = generator.choice(["chat", "nonsense", 5])
    return framed(msgspec.msgpack.encode(fields))


def wrong_fields(generator: random.Random) -> bytes:
    fields = msgspec.to_builtins(a_message(generator))
    for _ in range(generator.randrange(1, 3)):
        others = ("params", "messages", "prompt_token_ids", "resume_token_ids", "template_args", "news")
        name = generator.choice([*fields, *others])
        value = generator.choice(ODD)
        fields[name] = {generator.choice(["n", "stop", "seed", "logit_bias", "temperature"]): value}
        fields[name] = fields[name] if generator.random() < 0.5 else value
    return greeting() + framed(msgspec.msgpack.encode(fields))


def wrong_order(generator: random.Random) -> bytes:
    parts = [frames.encode(a_message(generator)) for _ in range(4)] + [greeting()]
    generator.shuffle(parts)
    return b"".join(parts)


def many_valid_ones(generator: random.Random) -> bytes:
    return greeting() + b"".join(frames.encode(a_message(generator)) for _ in range(60))


def deep_nesting(generator: random.Random) -> bytes:
    depth = generator.randrange(100, 60_000)
    return greeting() + framed(b"\x82\xa4type\xa6submit\xa6params\x81\xa1x" + b"\x91" * depth + b"\xc0")


ATTACKS: tuple[Attack, ...] = (
    noise,
    noise_in_a_frame,
    huge_length,
    truncated,
    damaged,
    wrong_version,
    wrong_fields,
    wrong_order,
    many_valid_ones,
    deep_nesting,
)


def attack(path: Path, generator: random.Random) -> None:
    data = generator.choice(ATTACKS)(generator)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(20)
        sock.connect(str(path))
        try:
            while data:
                cut = generator.choice([len(data), 1, 3, 1000])
                sock.sendall(data[:cut])
                data = data[cut:]
                if cut < 1000 and generator.random() < 0.9:
                    cut = len(data)
                    sock.sendall(data)
                    data = b""
            ending = generator.random()
            if ending < 0.3:
                sock.shutdown(socket.SHUT_WR)
            if ending < 0.5:
                sock.settimeout(0.05)
                while sock.recv(65536):
                    pass
        except OSError:
            pass  # the engine has hung up, as it should


def fuzz(launcher: Launcher, attacks: int, seed: int, tell: Callable[[str], None] = print) -> None:
    """Raises SystemExit at the first sign of harm."""
    generator = random.Random(seed)
    engine = ProcessEngine(launcher)
    pid = engine.engine_pid
    prompt = tuple(engine.tokenizer.encode("the witness"))
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    def witness(name: str) -> str:
        engine.submit(Request(name, prompt, params))
        text = ""
        while engine.has_unfinished:
            for delta in engine.poll(5.0):
                if delta.finish_reason not in (None, "length"):
                    raise SystemExit(f"the witness ended with {delta.finish_reason}: {delta.error}")
                text += delta.text
        return text

    expected = witness("w")
    start = resident_bytes(pid)
    for number in range(1, attacks + 1):
        attack(launcher.paths.socket, generator)
        if number % 50 == 0 and witness(f"w{number}") != expected:
            raise SystemExit(f"after {number} attacks the witness got another answer")
        if number == attacks // 5:
            start = resident_bytes(pid)
    if engine.engine_pid != pid:
        raise SystemExit("the engine died")
    # Requests that asked to go on without their client have an end, the others were cancelled with it.
    while len(engine.snapshot().clients) > 1 or engine.snapshot().slots or engine.snapshot().waiting:
        pass
    grown = resident_bytes(pid) - start
    log = launcher.paths.log.read_text()
    if "Traceback" in log:
        raise SystemExit(f"the engine logged an internal error:\n{log[log.index('Traceback') - 500 :][:3000]}")
    tell(f"{attacks} attacks: the engine lives, every answer is right, memory grew by {grown / 1e6:.1f} MB")
    engine.close()


def resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return 0
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", type=int, default=3000)
    parser.add_argument("--model", choices=("scripted", "tiny"), default="scripted")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxb-") as name:
        folder = Path(name)
        runtime = RuntimeDir(folder / "run", folder / "logs").prepared()
        if options.model == "scripted":
            launcher = scripted_launcher(runtime)
        else:
            from e2e.kill_engine import tiny_model

            launcher = Launcher(EngineConfig(model=tiny_model(folder)), runtime=runtime)
        try:
            fuzz(launcher, options.attacks, options.seed)
        finally:
            for record in Registry(runtime).live():
                stop_engine(record, runtime, force=True)


if __name__ == "__main__":
    main()
