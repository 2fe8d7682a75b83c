"""docs/rewards.md lists every built-in reward."""

from pathlib import Path

from covey import rewards
from covey.rewards.resolve import BUILT_IN

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"


def test_every_built_in_reward_is_on_the_page_and_public():
    page = PAGE.read_text()
    assert all(name in page and name in rewards.__all__ for name in BUILT_IN)
