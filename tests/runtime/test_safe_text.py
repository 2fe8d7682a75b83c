"""What is shown carries neither control characters nor secrets."""

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
