"""The open tabs, the engines behind them, and the way of events from one to the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mlxbatch.engine.snapshot import Snapshot
from mlxbatch.history.records import ChatRecord
from mlxbatch.history.store import HistoryStore
from mlxbatch.request import OutputDelta, RequestTiming
from mlxbatch.tui.chat.session import ChatSession
from mlxbatch.tui.engine_link import EngineLink, LinkEvent, LinkStatus

LinkFactory = Callable[[str], EngineLink]


@dataclass(slots=True)
class EngineView:
    """One engine as this interface knows it. `arrived` is when the snapshot came, monotonic seconds."""

    link: EngineLink
    status: LinkStatus = field(default_factory=lambda: LinkStatus("starting", "starting the engine"))
    snapshot: Snapshot | None = None
    arrived: float = 0.0


class Workspace:
    """Tabs in order, one of them on show. There is always at least one after `open_tabs`."""

    def __init__(
        self,
        store: HistoryStore,
        link_factory: LinkFactory,
        model: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        system_prompt: str = "",
        sampling: dict[str, object] | None = None,
    ) -> None:
        self.store = store
        self.model = model
        self.sessions: list[ChatSession] = []
        self.index = 0
        self.engines: dict[str, EngineView] = {}
        self.clock = clock
        self._link_factory = link_factory
        self._system_prompt = system_prompt
        self._sampling = dict(sampling or {})

    @property
    def active(self) -> ChatSession:
        return self.sessions[self.index]

    @property
    def active_engine(self) -> EngineView:
        return self.engines[self.active.link.model]

    @property
    def streaming(self) -> bool:
        return any(session.streaming for session in self.sessions)

    def engine_for(self, model: str) -> EngineView:
        """The view of that model's engine; a new one is not started yet."""
        if model not in self.engines:
            self.engines[model] = EngineView(self._link_factory(model))
        return self.engines[model]

    def drop_unused_engines(self) -> list[EngineView]:
        """Forget engines that no tab uses; the caller disconnects them."""
        used = {session.link.model for session in self.sessions}
        return [self.engines.pop(model) for model in list(self.engines) if model not in used]

    # Tabs

    def restore(self, *, fresh: bool = False) -> None:
        """The tabs of the interface that ended last, or one new tab. `fresh` puts a new tab on show."""
        chats, active = self.store.restore_tabs()
        for chat in chats:
            self._append(chat)
        if fresh or not self.sessions:
            self.new_tab()
        else:
            ids = [session.chat.id for session in self.sessions]
            self.index = ids.index(active) if active in ids else 0
            self.active.unseen = False
        self._save_tabs()

    def new_tab(self) -> ChatSession:
        """A new chat on show; the blank one, if there already is one."""
        for index, session in enumerate(self.sessions):
            if session.is_blank:
                self.select(index)
                return session
        chat = self.store.create_chat(model=self.model, system_prompt=self._system_prompt, sampling=self._sampling)
        return self.open_chat(chat)

    def open_chat(self, chat: ChatRecord) -> ChatSession:
        """Show a chat, in its tab if it has one."""
        for index, session in enumerate(self.sessions):
            if session.chat.id == chat.id:
                self.select(index)
                return session
        self._append(chat)
        self.select(len(self.sessions) - 1)
        return self.active

    def select(self, index: int) -> None:
        self.index = index % len(self.sessions)
        self.active.unseen = False
        self._save_tabs()

    async def close_tab(self, session: ChatSession) -> None:
        """Close a tab; its chat stays in the history, unless nothing was ever said in it."""
        await session.stop()
        session.autosave()
        position = self.sessions.index(session)
        self.sessions.remove(session)
        if session.is_blank:
            self.store.delete_chat(session.chat.id)
        if not self.sessions:
            self.new_tab()
        if position < self.index:
            self.index -= 1
        self.select(min(self.index, len(self.sessions) - 1))

    def forget_chat(self, chat_id: int) -> ChatSession | None:
        """Delete a chat for good. Returns its session when it was open."""
        self.store.delete_chat(chat_id)
        session = next((session for session in self.sessions if session.chat.id == chat_id), None)
        if session is not None:
            self.sessions.remove(session)
            if not self.sessions:
                self.new_tab()
            self.select(min(self.index, len(self.sessions) - 1))
        return session

    # Events

    def dispatch(self, engine: EngineView, event: LinkEvent) -> None:
        """Give an event to whom it concerns. A snapshot older than the one on show is dropped."""
        if isinstance(event, OutputDelta):
            session = self._session_of(engine, event.request_id)
            if session is not None:
                session.take(event)
        elif isinstance(event, RequestTiming):
            for session in self.sessions:
                if session.link is engine.link:
                    session.time(event)
        elif isinstance(event, Snapshot):
            if engine.snapshot is None or event.number > engine.snapshot.number:
                engine.snapshot, engine.arrived = event, self.clock()
        else:
            if event.state == "restarting":
                for session in self.sessions:
                    if session.link is engine.link:
                        session.engine_restarted()
            if event.state != "ready":
                engine.snapshot = None  # another engine counts its snapshots anew
            engine.status = event

    def autosave(self) -> None:
        for session in self.sessions:
            session.autosave()

    def own_requests(self, engine: EngineView) -> dict[str, str]:
        """Engine-wide ids of the answers that stream here, with the titles of their tabs."""
        return {
            session.link.request_key(session.answer.request_id): session.title
            for session in self.sessions
            if session.answer is not None and session.link is engine.link
        }

    def close(self) -> None:
        """Save everything; answers that still stream keep what they have."""
        for session in self.sessions:
            session.interrupt()
        self._save_tabs()
        self.store.close()

    def _session_of(self, engine: EngineView, request_id: str) -> ChatSession | None:
        return next(
            (
                session
                for session in self.sessions
                if session.answer is not None
                and session.answer.request_id == request_id
                and session.link is engine.link
            ),
            None,
        )

    def _append(self, chat: ChatRecord) -> None:
        engine = self.engine_for(chat.model or self.model)
        self.sessions.append(ChatSession(self.store, chat, engine.link, clock=self.clock))

    def _save_tabs(self) -> None:
        active = self.active.chat.id if self.sessions else None
        self.store.save_tabs((session.chat.id for session in self.sessions), active)
