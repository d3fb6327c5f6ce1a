"""Answers as Markdown that grows while it streams."""

from __future__ import annotations

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.events import Click
from textual.message import Message
from textual.widgets import Label, Markdown, Static
from textual.widgets._markdown import MarkdownStream
from textual.widgets.markdown import MarkdownFence

from mlxbatch.tui.drawing import printable


class CopyButton(Static):
    """The corner of a code block that copies it."""

    class Pressed(Message):
        def __init__(self, button: CopyButton) -> None:
            super().__init__()
            self.button = button

    def __init__(self) -> None:
        super().__init__("copy", classes="fence-copy", markup=False)

    def on_click(self, event: Click) -> None:
        event.stop()
        self.post_message(self.Pressed(self))


class CodeFence(MarkdownFence):
    """A code block with its language and a copy button above it.

    Highlighting costs more the longer the block is, so it waits until the block has been closed.
    """

    class CopyRequested(Message):
        def __init__(self, code: str) -> None:
            super().__init__()
            self.code = code

    def __init__(self, markdown: Markdown, token: Token, code: str) -> None:
        self.open = isinstance(markdown, AnswerMarkdown) and markdown.streaming and _is_open(token)
        super().__init__(markdown, token, code)

    def highlight(  # type: ignore[override]  # Textual's is a class method; ours needs to know the block
        self, code: str, language: str, ansi: bool = False, dark: bool = False
    ) -> Content:
        return Content(code) if self.open else MarkdownFence.highlight(code, language, ansi=ansi, dark=dark)

    def compose(self) -> ComposeResult:
        with Horizontal(classes="fence-head"):
            yield Label(self.lexer.split(maxsplit=1)[0] if self.lexer else "code", classes="fence-language")
            yield CopyButton()
        yield from super().compose()

    @on(CopyButton.Pressed)
    def _copy(self, event: CopyButton.Pressed) -> None:
        event.stop()
        self.post_message(self.CopyRequested(self.code))

    def close(self) -> None:
        """The answer has ended: highlight even a block whose end never came."""
        if self.open:
            self.open = False
            self.notify_style_update()


def _is_open(token: Token) -> bool:
    """A closed fence maps to two lines more than it holds: the opening and the closing mark."""
    if token.map is None or token.type != "fence":
        return False
    start, end = token.map
    return end - start < token.content.count("\n") + 2


def _new_parser() -> MarkdownIt:
    """Textual's dialect with two changes for what models write.

    Tags are shown as they stand: it would drop them, and a terminal has no HTML. A line break in a paragraph
    breaks the line, as in every chat: models end the lines of a poem or an address with a bare one.
    """
    parser = MarkdownIt("gfm-like", {"html": False})
    parser.core.ruler.push("line_breaks", _keep_line_breaks)
    return parser


def _keep_line_breaks(state: StateCore) -> None:
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"


def drawable(text: str) -> int:
    """How much of a text that still grows can be drawn: a table's rows wait until they are whole, and its head
    until the line below it has come, since they would show as bars and dashes meanwhile."""
    head, newline, partial = text.rpartition("\n")
    is_row = partial.lstrip().startswith("|")
    if partial.strip() and not is_row:
        return len(text)
    lines = head.split("\n") if newline else []
    rows = 0
    while rows < len(lines) and lines[-1 - rows].lstrip().startswith("|"):
        rows += 1
    if rows == 1:
        return len(text) - len(lines[-1]) - 1 - len(partial)
    return len(text) - (len(partial) if is_row else 0)


class AnswerMarkdown(Markdown):
    """Markdown to which text is appended; `show` gives it the whole text as it stands."""

    class Ready(Message):
        """The first text is drawn; what has come since can be shown."""

    def __init__(self, text: str, *, streaming: bool) -> None:
        self.streaming = streaming
        super().__init__(classes="answer", parser_factory=_new_parser)
        self.BLOCKS = {**Markdown.BLOCKS, "fence": CodeFence, "code_block": CodeFence}
        self._first = printable(text)
        self._shown = len(self._first)
        self._ready = False
        self._stream: MarkdownStream | None = None

    def on_mount(self) -> None:
        # Textual's own handler comes after this one and empties the widget; text appended before that would
        # be lost or doubled.
        self.call_next(self._begin)

    async def _begin(self) -> None:
        await self.update(self._first)
        self._ready = True
        self.post_message(self.Ready())

    async def show(self, text: str, *, finished: bool) -> None:
        """Append what is new in `text`; at the end, finish the last block."""
        if not self._ready:
            return
        text = printable(text)
        ready = len(text) if finished else drawable(text)
        if ready > self._shown:
            if self._stream is None:
                self._stream = Markdown.get_stream(self)
            fresh, self._shown = text[self._shown : ready], ready
            await self._stream.write(fresh)
        if finished and self.streaming:
            self.streaming = False
            if self._stream is not None:
                await self._stream.stop()
                self._stream = None
            for fence in self.query(CodeFence):
                fence.close()

    def code_blocks(self) -> list[str]:
        return [fence.code for fence in self.query(CodeFence)]
