"""One tab: a conversation, the answer that streams into it, and its place in the history file."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.errors import MlxbatchError, UsageError
from mlxbatch.history.conversation import Conversation
from mlxbatch.history.records import Attachment, ChatRecord, MessageRecord
from mlxbatch.history.store import HistoryStore
from mlxbatch.process.messages import Submit, params_to_wire
from mlxbatch.request import OutputDelta, Priority, RequestTiming, SamplingParams
from mlxbatch.tui.chat.answer import Answer, timed_figures
from mlxbatch.tui.chat.prompt import fit_prompt
from mlxbatch.tui.chat.thoughts import Thoughts
from mlxbatch.tui.engine_link import EngineLink

TabState = Literal["idle", "waiting", "prefill", "thinking", "decoding", "unseen", "failed"]
TITLE_LENGTH = 40

# A chat that says nothing about sampling gets the engine's defaults, but no limit on its answers.
CHAT_DEFAULTS: dict[str, object] = {"max_tokens": None, "temperature": 0.7, "top_p": 0.95}


class ChatSession:
    """All that a tab knows, without a widget. `revision` changes whenever its turns do."""

    def __init__(
        self,
        store: HistoryStore,
        chat: ChatRecord,
        link: EngineLink,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.chat = chat
        self.link = link
        self.tree = Conversation(store.messages(chat.id), chat.leaf)
        self.attachments: list[Attachment] = []
        self.editing: int | None = None  # the turn that the next message replaces with a new version
        self.set_aside = ""  # what was being typed when the edit began
        self.answer: Answer | None = None
        self.unseen = False
        self.revision = 0
        self._clock = clock

    # What it shows

    @property
    def title(self) -> str:
        return self.chat.title or "new chat"

    @property
    def is_blank(self) -> bool:
        return not len(self.tree) and not self.chat.draft and not self.attachments

    @property
    def streaming(self) -> bool:
        return self.answer is not None

    def state(self, snapshot: Snapshot | None) -> TabState:
        """For the dot on the tab."""
        if self.answer is None:
            last = self.tree[self.tree.leaf] if self.tree.leaf is not None else None
            if self.unseen:
                return "failed" if last is not None and last.status == "error" else "unseen"
            return "idle"
        if self.answer.phase in ("thinking", "decoding"):
            return self.answer.phase
        if snapshot is not None:
            key = self.link.request_key(self.answer.request_id)
            if any(slot.request_id == key for slot in snapshot.slots):
                return "prefill"
        return "waiting"

    def sampling(self) -> SamplingParams:
        """The chat's parameters. Raises RequestError for a value out of range."""
        return SamplingParams(**{**CHAT_DEFAULTS, **self.chat.sampling})  # type: ignore[arg-type]

    def context_tokens(self) -> int | None:
        """Tokens of the newest prompt and its answer, as the engine counted them."""
        for message in reversed(self.tree.path()):
            if message.figures.prompt_tokens is not None:
                return message.figures.prompt_tokens + (message.figures.output_tokens or 0)
        return None

    # What the user does

    def attach(self, attachment: Attachment) -> None:
        self.attachments.append(attachment)
        self.revision += 1

    def add_question(self, text: str) -> MessageRecord:
        """Add the user's turn (a new version, when one is being edited). It is saved when this returns."""
        if self.answer is not None:
            raise UsageError("an answer is still streaming here; Esc stops it, Ctrl+N opens another tab")
        parent = self.tree.leaf
        if self.editing is not None:
            original = self.tree[self.editing]
            parent, self.editing = original.parent, None
            kept = [item for item in original.attachments if item not in self.attachments]
            self.attachments = kept + self.attachments
        turn = self.store.add_message(self.chat, parent, "user", text, attachments=self.attachments)
        self.attachments = []
        self.tree.add(turn)
        if not self.chat.title:
            self.chat.title = title_of(turn)
        self._save_chat()
        return turn

    async def answer_to(self, question: MessageRecord) -> None:
        """Have a user's turn answered; what goes wrong is noted in the answer."""
        message = self.store.add_message(
            self.chat, question.id, "assistant", "", status="streaming", model=self.link.model
        )
        self.tree.add(message)
        self._save_chat()
        answer = Answer(message, str(message.id), self._clock)
        self.answer = answer
        self.revision += 1
        try:
            params = self.sampling()
            turns = self.tree.path(question.id)
            prompt = await fit_prompt(
                self.chat.system_prompt,
                turns,
                self.link.count_chat,
                context=self.link.max_model_len,
                max_tokens=params.max_tokens,
                dropped_before=self._dropped_before(turns),
            )
            message.dropped = prompt.dropped
            answer.thoughts = Thoughts(self.link.answers)  # known now that the engine has counted
            wire = params_to_wire(params)
            if self.link.answers.tags.special:
                wire["skip_special_tokens"] = False  # else the tags would be missing from the text
            if params.max_tokens is not None and self.link.max_model_len:
                wire["max_tokens"] = min(params.max_tokens, self.link.max_model_len - prompt.tokens)
            if answer.phase == "stopping":
                answer.take(OutputDelta(answer.request_id, 0, (), "", finish_reason="abort"))
            else:
                answer.phase = "waiting"
                await self._submit(answer, prompt.messages, wire)
        except MlxbatchError as error:
            answer.fail(str(error))
        if answer.finished and self.answer is answer:
            self._end()

    async def regenerate(self, message_id: int | None = None) -> None:
        """Another version of an answer (the last one if None); for a user's turn, another answer to it."""
        target = message_id if message_id is not None else self.tree.leaf
        if target is None:
            raise UsageError("there is no answer to regenerate yet")
        if self.answer is not None:
            await self.stop()
            self._end()
        message = self.tree[target]
        question = message if message.role == "user" else self._question_of(message)
        await self.answer_to(question)

    async def stop(self) -> None:
        """End the answer that streams; what there is of it stays."""
        if self.answer is not None:
            self.answer.phase = "stopping"
            await self.link.cancel(self.link.request_key(self.answer.request_id))

    def show_version(self, message_id: int, offset: int) -> bool:
        """Show the next or previous version of a turn."""
        if self.answer is not None:
            raise UsageError("an answer is still streaming here; Esc stops it")
        if self.tree.step_version(message_id, offset) is None:
            return False
        self._save_chat()
        return True

    def branch(self, message_id: int) -> ChatRecord:
        """A new chat that begins with the turns up to this one."""
        path = self.tree.path(message_id)
        return self.store.copy_path(self.chat, path, f"{self.title} (branch)")

    def set_title(self, title: str) -> None:
        self.chat.title = " ".join(title.split())
        self._save_chat()

    def set_system_prompt(self, text: str) -> None:
        self.chat.system_prompt = text.strip()
        self._save_chat()

    def set_sampling(self, changes: dict[str, object]) -> None:
        """Change parameters; None goes back to the default. Raises RequestError and changes nothing when
        a value is out of range."""
        merged = {name: value for name, value in {**self.chat.sampling, **changes}.items() if value is not None}
        SamplingParams(**{**CHAT_DEFAULTS, **merged})  # type: ignore[arg-type]
        self.chat.sampling = merged
        self._save_chat()

    def set_link(self, link: EngineLink) -> None:
        """Answers come from another model from now on."""
        if self.answer is not None:
            raise UsageError("an answer is still streaming here; Esc stops it")
        self.link = link
        self.chat.model = link.model
        self._save_chat()

    def take_aside(self) -> str:
        """What an edit had put aside, once."""
        text, self.set_aside = self.set_aside, ""
        return text

    def save_draft(self, text: str) -> None:
        if text != self.chat.draft:
            self.store.save_draft(self.chat, text)

    # What the engine says

    def take(self, delta: OutputDelta) -> None:
        if self.answer is None or delta.request_id != self.answer.request_id:
            return
        self.answer.take(delta)
        self.revision += 1
        if self.answer.finished:
            self._end()

    def time(self, timing: RequestTiming) -> None:
        """The timing of a finished answer, which arrives after its last delta."""
        message = self._message_of(timing.request_id)
        if message is None:
            return
        message.figures = timed_figures(message.figures, timing)
        self.store.save_message(message)
        self.revision += 1

    def autosave(self) -> None:
        """Once a second: what has streamed since."""
        if self.answer is not None and not self.answer.saved:
            self.store.save_message(self.answer.message)
            self.answer.saved = True

    def interrupt(self) -> None:
        """The interface ends: what has streamed so far is what stays."""
        if self.answer is not None:
            self.answer.message.status = "interrupted"
            self._end()

    def engine_restarted(self) -> None:
        """Leave a note that the answer goes on in a new engine."""
        if self.answer is not None:
            self.answer.message.note = "the engine was restarted; the answer goes on from where it was"
            self.answer.saved = False
            self.revision += 1

    # Inside

    async def _submit(self, answer: Answer, messages: Sequence[dict[str, object]], params: dict[str, object]) -> None:
        tokens = await self.link.submit(
            Submit(
                request_id=answer.request_id,
                messages=list(messages),
                params=params,
                priority=int(Priority.INTERACTIVE),
                label=self.title,
            )
        )
        answer.prompt_accepted(tokens)
        self.revision += 1

    def _message_of(self, request_id: str) -> MessageRecord | None:
        return self.tree.get(int(request_id)) if request_id.isdecimal() else None

    def _dropped_before(self, turns: Sequence[MessageRecord]) -> int:
        return next((turn.dropped for turn in reversed(turns) if turn.role == "assistant"), 0)

    def _question_of(self, answer: MessageRecord) -> MessageRecord:
        if answer.parent is None:
            raise UsageError("this answer has no question to ask again")
        return self.tree[answer.parent]

    def _end(self) -> None:
        if self.answer is None:
            return
        message = self.answer.message
        if message.status == "streaming":
            message.status = "stopped"
        self.store.save_message(message)
        self.answer = None
        self.unseen = True
        self.revision += 1

    def _save_chat(self) -> None:
        self.chat.leaf = self.tree.leaf
        self.store.save_chat(self.chat)
        self.revision += 1


def title_of(turn: MessageRecord) -> str:
    """The first words of a turn, or the name of its first file."""
    words = turn.content.split()
    if not words:
        return turn.attachments[0].name if turn.attachments else ""
    title = words[0][:TITLE_LENGTH]
    for word in words[1:]:
        if len(title) + 1 + len(word) > TITLE_LENGTH:
            return title + "…"
        title += f" {word}"
    return title
