"""What is shown carries neither control characters nor secrets."""

import collections
import dataclasses
import time

import pytest

from covey.runtime.safe_text import printable, without_secrets
from covey.runtime.user_code import format_error


def test_control_characters_are_escaped_and_text_stays():
    assert printable("a\x1b]52;c;ZXZpbA==\x07\r\x9b31m\u202eb") == "a\\x1b]52;c;ZXZpbA==\\x07\\x0d\\x9b31m\\u202eb"
    assert printable("één\nline\tand 東京 🙂") == "één\nline\tand 東京 🙂"


def test_marks_of_direction_and_halves_of_characters_are_escaped():
    assert printable("a\u200fb\u061c\u2028\ufeff\ud800") == r"a\u200fb\u061c\u2028\ufeff\ud800"


def test_errors_of_user_code_cannot_steer_a_terminal():
    assert format_error(ValueError("\x1b[2J")) == "ValueError: \\x1b[2J"


def test_secrets_are_left_out_at_every_depth():
    given = {"api_key": "K", "hf_token": "T", "Authorization": "A", "n": 1, "inner": {"secret": "S", "x": "y"}}
    assert without_secrets(given) == {"n": 1, "inner": {"x": "y"}}
    names = ("apiKey", "hfToken", "API-KEY", "auth", "bearer", "passwd", "credentials", "cookie", "access_token ")
    for name in (*names, "passphrase", "jwt"):
        assert without_secrets({name: "K"}) == without_secrets({name: ["K"]}) == {}, name
    assert without_secrets({"headers": [{"Authorization": b"K"}]}) == {"headers": [{}]}
    assert without_secrets({"url": "http://me:K@host/"}) == {"url": "http://host/"}
    url = "http://host/v1?n=1&api_key=K&x=y#a"
    assert without_secrets(url) == "http://host/v1?n=1&api_key=...&x=y#a"
    assert without_secrets({"max_tokens": 3, "author": "x"}) == {"max_tokens": 3, "author": "x"}
    assert without_secrets({"token": True, "eos_token_id": 3}) == {"token": True, "eos_token_id": 3}


@dataclasses.dataclass
class Login:
    user: str
    token: str


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ([("token", "K"), ["n", 1]], [("token", "..."), ["n", 1]]),
        (["--api-key", "K", "--n", "2"], ["--api-key", "...", "--n", "2"]),
        (["key", "value", "query"], ["key", "value", "query"]),  # modules of a model
        (collections.OrderedDict(token="K", n=1), {"n": 1}),
        ({"logins": [Login("me", "K")]}, {"logins": [{"user": "me"}]}),
        (collections.namedtuple("Pair", "name, key")("me", "K"), {"name": "me"}),
    ],
)
def test_secrets_are_left_out_of_every_container(given, shown):
    assert without_secrets(given) == shown


@pytest.mark.parametrize("value", [(1, "a"), Login("me", None), collections.namedtuple("P", "x")(1), Login, 1.5, b"x"])
def test_what_holds_no_secret_keeps_its_type(value):
    assert without_secrets(value) == value and type(without_secrets(value)) is type(value)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("{'Authorization': 'Bearer abcdefgh'}", "{'Authorization': 'Bearer ...'}"),
        ("x-api-key: abcdefg1, n", "x-api-key: ..., n"),
        ('{"api_key": "abcdefgh"}', '{"api_key": "..."}'),
        ("HF_TOKEN=abcdefgh sent", "HF_TOKEN=... sent"),
        ("#access_token=abcdefgh", "#access_token=..."),
        ("['curl', '--api-key', 'K']", "['curl', '--api-key', '...']"),
        ("call(--my-long-name_of-an-api-key K)", "call(--my-long-name_of-an-api-key ..."),
        ("covey grpo --hub_token K --beta 0", "covey grpo --hub_token ... --beta 0"),
        ("sent Bearer abcdefghijklmnop", "sent Bearer ..."),
        ("hf_ABCDEFGHIJKLMNOPQ is refused", "hf_... is refused"),
    ],
)
def test_secrets_are_left_out_of_texts(given, shown):
    assert without_secrets(given) == shown


@pytest.mark.parametrize(
    "text",
    [
        "answer key: 42",
        "The key: remember units",
        "Invalid token: '<'",
        "monkey: something_long",
        "--key --beta",
        "KeyError: 'solutions'",
    ],
)
def test_texts_without_secrets_stay(text):
    assert without_secrets(text) == text


@pytest.mark.parametrize("text", ["--" + "_" * 9000, "--" + "a_" * 5000, "--a" * 3000, "-" * 9000, "token=" * 2000])
def test_long_texts_are_searched_in_no_time(text):
    """Nested repetitions would take minutes for a line of a hundred characters that a model has written."""
    started = time.process_time()
    without_secrets(text)
    assert time.process_time() - started < 2


def test_errors_of_user_code_show_no_secret():
    error = ValueError("GET https://me:S@host/?api_key=S failed, " + "x" * 1000)
    assert format_error(error).startswith("ValueError: GET https://host/?api_key=... failed, x")
