"""Situations that the frames show."""

from __future__ import annotations

from scripted_engine import ScriptedEngine

from mlxbatch.engine.snapshot import ClientInfo
from mlxbatch.history.records import AnswerFigures
from mlxbatch.history.store import HistoryStore

QUESTION = "Why does paged attention not need padding?"
ANSWER = """\
Each sequence owns a **block table**: a list of physical block ids. The kernel looks up \
`block_table[pos // 16]`, so two sequences of different length sit side by side without \
padding rows.

```python
def slot(pos, table, bs=16):
    return table[pos // bs] * bs + pos % bs
```

Consequences:

- memory is wasted only in the last block of each sequence (≤ 15 tokens);
- a shared prefix is one set of blocks with a reference count;
- a preempted sequence gives back blocks, not a contiguous region."""
FORK_ANSWER = (
    "<think>\nThe user asks about forks. Blocks are immutable, only tails are written. So a fork shares "
    "all of the blocks and copies one tail.\n</think>\n\n"
    "A fork copies the **block table** and bumps the reference counts. Only the last, partly filled block "
    "is copied when one branch writes to it (*copy-on-write*), so a fork costs almost nothing:\n\n"
    "| what | copied |\n|---|---|\n| block table | yes |\n| full blocks | no |\n| tail | yes |\n\n"
    "Nothing else moves. " + "Every further token belongs to one branch only. " * 12
)
HAIKU = "Quiet blocks of keys,\nshared by many, owned by none.\nA fork: two rivers."


def words(text: str) -> list[str]:
    """Tokens that keep their blanks and line breaks."""
    tokens, current = [], ""
    for character in text:
        current += character
        if character in " \n":
            tokens.append(current)
            current = ""
    return [*tokens, current] if current else tokens


def scripted(**options: object) -> ScriptedEngine:
    script = {"Why": words(ANSWER), "And what": words(FORK_ANSWER), "Write a haiku": words(HAIKU)}
    engine = ScriptedEngine(script=script, **options)  # type: ignore[arg-type]
    engine.clients.append(ClientInfo(client_id="run1", kind="run", pid=777, title="run:evals", done=171, total=412))
    return engine


def earlier_chats(store: HistoryStore) -> None:
    """One open tab whose question has three answers, and older chats that are closed."""
    for title, question, answer in (
        ("Reading a Chrome trace", "How do I open a trace in Perfetto?", "Drop the trace file on the page."),
        ("Batch of evals", "Which flag resumes a run?", "Use --resume with the same input and output."),
        ("Fork and exec", "What does fork copy?", "The page table, copy-on-write; no page until it is written."),
    ):
        chat = store.create_chat(title=title)
        turn = store.add_message(chat, None, "user", question)
        store.add_message(chat, turn.id, "assistant", answer, model="Qwen3-4B-4bit")
    chat = store.create_chat(
        title="paged attention", system_prompt="Be terse.", sampling={"temperature": 0.7, "top_p": 0.95}
    )
    question = store.add_message(chat, None, "user", QUESTION)
    answers = []
    for text in ("Because of block tables.", ANSWER, "It does not need any."):
        answers.append(store.add_message(chat, question.id, "assistant", text, model="Qwen3-4B-4bit"))
        answers[-1].figures = AnswerFigures(
            prompt_tokens=1_022, output_tokens=214, ttft=0.31, tokens_per_second=50.8, cached_tokens=0
        )
        store.save_message(answers[-1])
    chat.leaf = answers[1].id
    store.save_chat(chat)
    store.save_tabs([chat.id], chat.id)


def evals(engine: ScriptedEngine, first: int, count: int, *, start: int = 1850, max_tokens: int = 512) -> None:
    """Requests of a batch run that share a system prompt of 1 792 tokens."""
    for number in range(first, first + count):
        engine.add(
            f"q-{number}",
            prompt_tokens=start + number % 7 * 13,
            label=f"q-{number}",
            prefix="system prompt of the evals",
            prefix_tokens=1_792,
            max_tokens=max_tokens,
        )


def mixed_load(engine: ScriptedEngine) -> None:
    """Two chats of another terminal and a batch run: rows that decode beside rows that prefill."""
    engine.clients.append(ClientInfo(client_id="chat2", kind="chat", pid=4343, title="chat"))
    engine.add("a", prompt_tokens=40, label="block tables", client="chat2", priority=0, max_tokens=1024)
    engine.play(60)
    evals(engine, 171, 1)
    engine.play(30)
    evals(engine, 172, 2)
    engine.play(20)
    engine.add("b", prompt_tokens=2_110, label="long file", client="chat2", priority=0)
    evals(engine, 174, 1, start=2_900)
    engine.play(8)


def full_pool(engine: ScriptedEngine) -> None:
    """Blocks of finished sequences fill what the running ones leave; the head of the queue lacks blocks."""
    evals(engine, 160, 1, max_tokens=24)
    engine.play(40)
    for number in range(6):
        engine.add(f"q-{161 + number}", prompt_tokens=420 + 30 * number, label=f"q-{161 + number}", max_tokens=90)
    engine.play(40)
    evals(engine, 170, 3)
    engine.add("q-180", prompt_tokens=1_400, label="q-180")
    evals(engine, 173, 9)
    engine.play(12)


def thrash(engine: ScriptedEngine) -> None:
    """Sequences that outgrow the pool take each other's blocks, just now once more."""
    for number in range(9):
        engine.add(f"q-{number}", prompt_tokens=200 + number * 40, label=f"q-{number}", max_tokens=300)
    while engine.totals.get("preemptions", 0) < 3:
        engine.step()
    engine.play(6)
