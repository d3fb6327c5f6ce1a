"""Length-prefixed msgpack frames: 4 bytes of big-endian length, then one message.

+--------+--------+--------+--------+------------------ length bytes ------------------+
|        length (unsigned)          |  msgpack map with "type" and the struct's fields |
+--------+--------+--------+--------+--------------------------------------------------+
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from mlxbatch.errors import EngineError
from mlxbatch.process.messages import ClientMessage, EngineMessage, Message

HEADER = struct.Struct(">I")
MAX_FRAME = 32 * 2**20  # a prompt of some million tokens fits; more is refused, not buffered
HELLO_FRAME = 64 * 2**10  # before the handshake a peer may be anything

M = TypeVar("M")


class FrameError(EngineError):
    """The peer does not speak this protocol; the connection is of no more use."""


def encode(message: Message) -> bytes:
    """One frame. Raises FrameError for a message over MAX_FRAME or with values that msgpack cannot hold."""
    try:
        payload = msgspec.msgpack.encode(message)
    except (OverflowError, TypeError, ValueError, RecursionError) as error:
        raise FrameError(f"a {type(message).__name__} cannot be sent to the engine: {error}") from None
    if len(payload) > MAX_FRAME:
        raise FrameError(
            f"a {type(message).__name__} of {len(payload):,} bytes is over the limit of {MAX_FRAME:,} bytes"
        )
    return HEADER.pack(len(payload)) + payload


class FrameReader(Generic[M]):
    """Cuts a byte stream into messages of one side. Holds at most one frame beyond what was fed.

    `limit` is in bytes per frame and may be raised once the peer is known.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[M], limit: int = MAX_FRAME) -> None:
        self._decoder = decoder
        self._buffer = bytearray()
        self.limit = limit

    @property
    def buffered(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[M]:
        """Messages that `data` completes. Raises FrameError at the first frame that is not one."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer)
            if length > self.limit:
                raise FrameError(f"a frame of {length:,} bytes is over the limit of {self.limit:,}")
            if len(self._buffer) < HEADER.size + length:
                return
            payload = bytes(self._buffer[HEADER.size : HEADER.size + length])
            del self._buffer[: HEADER.size + length]
            yield self._decode(payload)

    def _decode(self, payload: bytes) -> M:
        # Untrusted bytes: besides msgspec's own errors, bad UTF-8, deep nesting and unhashable keys end here.
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise FrameError(f"not a message of this protocol: {error}") from None


def client_frames(limit: int = HELLO_FRAME) -> FrameReader[ClientMessage]:
    """For the engine: reads what clients send."""
    return FrameReader(msgspec.msgpack.Decoder(ClientMessage), limit)


def engine_frames(limit: int = 2 * MAX_FRAME) -> FrameReader[EngineMessage]:
    """For a client: reads what the engine sends."""
    return FrameReader(msgspec.msgpack.Decoder(EngineMessage), limit)
