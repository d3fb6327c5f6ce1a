"""Errors that a user can cause or mend. Front ends print `str(error)` and never a traceback."""


class MlxbatchError(Exception):
    """Base class. The message says what happened, where, and what to do."""

    exit_code = 3


class UsageError(MlxbatchError):
    """A wrong flag, setting, or input file."""

    exit_code = 2


class ModelError(MlxbatchError):
    """A model that cannot be found, read, or run."""

    exit_code = 3


class EngineError(MlxbatchError):
    """The engine failed, or cannot be reached."""

    exit_code = 3


class NoRoomError(ModelError):
    """The model does not fit into what is left of the machine."""


class RequestError(MlxbatchError):
    """One request that cannot be served. `code` and `param` go into its error record.

    `code` follows the OpenAI error codes where one exists, for example "context_length_exceeded".
    """

    exit_code = 1

    def __init__(self, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
