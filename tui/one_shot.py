"""One question, one answer on standard output, no interface."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

import msgspec

from mlxbatch.errors import EngineError
from mlxbatch.history.records import Attachment, MessageRecord
from mlxbatch.process.messages import Submit, params_to_wire
from mlxbatch.request import OutputDelta, Priority, SamplingParams
from mlxbatch.tui.chat.prompt import chat_messages
from mlxbatch.tui.chat.thoughts import Thoughts
from mlxbatch.tui.engine_link import EngineLink, LinkStatus


def ask(
    link: EngineLink,
    prompt: str,
    attachments: Sequence[Attachment],
    params: SamplingParams,
    *,
    system_prompt: str = "",
    output: TextIO | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Print the answer as it comes; thinking is left out. `tell` hears what the engine is doing meanwhile.

    Raises EngineError and RequestError.
    """
    turn = MessageRecord(0, 0, None, "user", prompt, 0.0, attachments=tuple(attachments))
    submit = Submit(
        request_id="0",
        messages=chat_messages(system_prompt, [turn]),
        params=params_to_wire(params),
        priority=int(Priority.INTERACTIVE),
        label=" ".join(prompt.split())[:40],
    )
    asyncio.run(_ask(link, submit, output or sys.stdout, tell))


async def _ask(link: EngineLink, submit: Submit, output: TextIO, tell: Callable[[str], None]) -> None:
    printing = asyncio.create_task(_print_answer(link, output, tell))
    try:
        await link.start()
        if link.answers.tags.special:
            params = {**submit.params, "skip_special_tokens": False}
            submit = msgspec.structs.replace(submit, params=params)
        await link.submit(submit)
        await printing
    finally:
        printing.cancel()
        await link.close()


async def _print_answer(link: EngineLink, output: TextIO, tell: Callable[[str], None]) -> None:
    written, thoughts = "", Thoughts(link.answers)
    async for event in link.events():
        if isinstance(event, LinkStatus):
            if event.state == "ready":
                thoughts = Thoughts(link.answers)
            else:
                tell(event.text)
        elif isinstance(event, OutputDelta):
            text = thoughts.feed(event.text)[1]
            if event.finish_reason is not None:
                text += thoughts.close()[1]
            output.write(text)
            output.flush()
            written += text
            if event.finish_reason is not None:
                if written and not written.endswith("\n"):
                    output.write("\n")
                output.flush()
                if event.error:
                    raise EngineError(event.error)
                return
