"""What can go wrong between a trainer and an inference server. Every message says who, what, and what to do."""

from collections.abc import Iterator
from contextlib import contextmanager


class ServerError(RuntimeError):
    """A server did not do what was asked of it.

    Attributes:
        url: of the server.
        doing: what was asked, as in "generate" or "send weights of version 3".
        said: the server's own words, or what happened instead.
    """

    hint = "Look at the server's log."

    def __init__(self, url: str, doing: str, said: str, hint: str | None = None):
        self.url, self.doing, self.said = url, doing, said
        super().__init__(f"{url}: cannot {doing}: {said.rstrip('.')}. {hint or self.hint}")


class ServerUnreachable(ServerError):
    """Nobody answers, or the connection broke: another server, or the same one later, may do it."""

    hint = "Is it running there, and may this machine connect to it?"


class DeadlineExceeded(ServerError):
    """It took too long: another server, or the same one later, may do it."""

    hint = "Raise the deadline if the server is only slow; else look at its log."

    @classmethod
    def of(cls, setting: str, error: ServerError) -> "DeadlineExceeded":
        """The same, for a deadline that a setting decides."""
        hint = f"Raise {setting} if the server is only slow; else look at its log."
        return cls(error.url, error.doing, error.said, hint)


class GroupNotJoined(DeadlineExceeded):
    """It lives, and did not meet this machine in a group in time: something keeps the two from connecting."""


class ServerBusy(ServerError):
    """It answered that it cannot just now (429, 503): the same one later may do it."""


class ServerRefused(ServerError):
    """It said no (400, 401, 404, 422) or cannot be spoken to like this: asking again would not help."""


class BadAnswer(ServerError):
    """It answered something that cannot be used: not JSON, fields missing, NaN log-probs."""


RETRIED = (ServerUnreachable, DeadlineExceeded, ServerBusy)
"""Failures that may pass."""


class NoServerLeft(RuntimeError):
    """Servers are gone, and none came back in time. The message ends with each one's last words.

    Attributes:
        words: by URL.
    """

    def __init__(self, said: str, words: dict[str, str]):
        self.words = words
        super().__init__(said + "".join(f"\n  {url}: {_once(url, text)}" for url, text in words.items()))


def _once(url: str, text: str) -> str:
    return text.removeprefix(f"{url}: ") or "it answers, but holds other weights than the current ones."


@contextmanager
def same_vocabulary(token: int) -> Iterator[None]:
    """Within this context a server samples after the vocabulary's last token.

    Raises:
        ServerRefused: it has no such token, or whatever else it refused.
    """
    try:
        yield
    except ServerRefused as error:
        if "vocabulary" not in error.said:
            raise
        said = f"its vocabulary lacks token {token} of the model that is trained ({error.said})"
        raise ServerRefused(
            error.url, "sample for this run", said, "Start the server with the model that is trained."
        ) from error
