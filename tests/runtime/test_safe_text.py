"""What is shown carries neither control characters nor secrets."""

from covey.runtime.safe_text import printable, without_secrets
from covey.runtime.user_code import format_error


def test_control_characters_are_escaped_and_text_stays():
    assert printable("a\x1b]52;c;ZXZpbA==\x07\r\x9b31m\u202eb") == "a\\x1b]52;c;ZXZpbA==\\x07\\x0d\\x9b31m\\u202eb"
    assert printable("één\nline\tand 東京 🙂") == "één\nline\tand 東京 🙂"


def test_errors_of_user_code_cannot_steer_a_terminal():
    assert format_error(ValueError("\x1b[2J")) == "ValueError: \\x1b[2J"


def test_secrets_are_left_out_at_every_depth():
    given = {"api_key": "K", "hf_token": "T", "Authorization": "A", "n": 1, "inner": {"secret": "S", "x": "y"}}
    assert without_secrets(given) == {"n": 1, "inner": {"x": "y"}}
    assert without_secrets({"token": True, "eos_token_id": 3}) == {"token": True, "eos_token_id": 3}
