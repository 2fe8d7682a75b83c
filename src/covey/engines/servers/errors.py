"""Errors between a trainer and an inference server. Every message names the server, the request and a remedy."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class ServerError(RuntimeError):
    """The server at `url` failed a request: `doing` is its purpose ("generate"), `message` the server's text."""

    hint = "Look at the server's log."

    def __init__(self, url: str, doing: str, message: str, hint: str | None = None):
        self.url, self.doing, self.message = url, doing, message
        super().__init__(f"{url}: cannot {doing}: {message.rstrip('.')}. {hint or self.hint}")


class ServerUnreachable(ServerError):
    """No answer, or a broken connection: another server, or the same one later, may succeed."""

    hint = "Is it running there, and may this machine connect to it?"


class DeadlineExceeded(ServerError):
    """An answer did not arrive in time: another server, or the same one later, may succeed."""

    hint = "Raise the deadline if the server is only slow; else look at its log."

    @classmethod
    def of(cls, setting: str, error: ServerError) -> "DeadlineExceeded":
        """`error` with a hint that names the setting of its deadline."""
        hint = f"Raise {setting} if the server is only slow; else look at its log."
        return cls(error.url, error.doing, error.message, hint)


class GroupNotJoined(DeadlineExceeded):
    """A server that answers but did not join a process group in time: something blocks the connection."""


class ServerBusy(ServerError):
    """Temporary refusal (408, 429, 502 to 504): the same server may succeed later."""


class ServerRefused(ServerError):
    """Permanent refusal (400, 401, 404, 422): a retry would not help."""


class BadAnswer(ServerError):
    """Unusable answer: not JSON, fields missing, NaN log-probs."""


RETRIED = (ServerUnreachable, DeadlineExceeded, ServerBusy)  # failures after which a retry may succeed


class NoServerLeft(RuntimeError):
    """All needed servers failed and none came back in time; the message ends with each one's last error (`errors`)."""

    def __init__(self, message: str, errors: dict[str, str]):
        self.errors = errors
        for url, text in errors.items():
            message += f"\n  {url}: {text.removeprefix(f'{url}: ') or 'it answers, but its weights are out of date.'}"
        super().__init__(message)


@contextmanager
def advised(hint: str, *parts: str, message: str = "{}", doing: str = "") -> Iterator[None]:
    """Context that adds advice to refusals whose text contains one of `parts`; {} in `message` stands for that text."""
    try:
        yield
    except ServerRefused as error:
        if parts and not any(part in error.message for part in parts):
            raise
        raise ServerRefused(error.url, doing or error.doing, message.replace("{}", error.message), hint) from error


def same_vocabulary(token: int) -> AbstractContextManager[None]:
    """Context for sampling after the vocabulary's last token; a refusal says that the server's vocabulary lacks it."""
    message = f"its vocabulary lacks token {token} of the model that is trained ({{}})"
    hint = "Start the server with the model that is trained."
    return advised(hint, "vocabulary", message=message, doing="sample for this run")
