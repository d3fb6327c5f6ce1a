"""One conversation as a tree: an edited question or a second answer is a version beside the first."""

from __future__ import annotations

from collections.abc import Iterable

from mlxbatch.history.records import MessageRecord


class Conversation:
    """The turns of a chat and the version on show.

    user 1 ── assistant 2 ── user 3 ── assistant 4        the path on show ends at `leaf`
                          └─ user 5 ── assistant 6        5 is a version of 3: same parent
    """

    def __init__(self, messages: Iterable[MessageRecord] = (), leaf: int | None = None) -> None:
        self._messages: dict[int, MessageRecord] = {}
        self._children: dict[int | None, list[int]] = {}
        self._chosen: dict[int | None, int] = {}
        self._leaf: int | None = None
        for message in messages:
            self.add(message)
        if leaf in self._messages:
            self.show(leaf)

    @property
    def leaf(self) -> int | None:
        return self._leaf

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, message_id: int) -> MessageRecord:
        return self._messages[message_id]

    def __contains__(self, message_id: object) -> bool:
        return message_id in self._messages

    def get(self, message_id: int) -> MessageRecord | None:
        return self._messages.get(message_id)

    def add(self, message: MessageRecord) -> None:
        """Add a turn and show the version that ends with it."""
        self._messages[message.id] = message
        self._children.setdefault(message.parent, []).append(message.id)
        self.show(message.id)

    def show(self, message_id: int | None) -> None:
        """Make the path through `message_id` the one on show, down to its last chosen leaf."""
        for message in self._upwards(message_id):
            self._chosen[message.parent] = message.id
        while message_id in self._chosen:
            message_id = self._chosen[message_id]
        self._leaf = message_id

    def path(self, last: int | None = None) -> list[MessageRecord]:
        """Turns from the first to `last` (the leaf on show if None)."""
        return list(self._upwards(self._leaf if last is None else last))[::-1]

    def versions(self, message_id: int) -> list[int]:
        """Ids of all versions of a turn, oldest first, itself included."""
        return self._children[self._messages[message_id].parent]

    def step_version(self, message_id: int, offset: int) -> int | None:
        """Show the version `offset` places further. Returns its id, None at either end."""
        versions = self.versions(message_id)
        index = versions.index(message_id) + offset
        if not 0 <= index < len(versions):
            return None
        self.show(versions[index])
        return versions[index]

    def _upwards(self, message_id: int | None) -> Iterable[MessageRecord]:
        while message_id is not None:
            message = self._messages[message_id]
            yield message
            message_id = message.parent
