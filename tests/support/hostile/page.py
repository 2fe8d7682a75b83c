"""The tables of benchmarks/survival.md, rendered from the hostile cases; `tools/troubleshooting.py` writes them."""

import re

from tests.support.hostile.environments import ENVIRONMENTS
from tests.support.hostile.functions import FUNCTIONS
from tests.support.hostile.rewards import REWARDS
from tests.support.hostile.tools import TOOLS

SECTIONS = {
    "Tools": TOOLS,
    "Rollout functions": FUNCTIONS,
    "Environments": ENVIRONMENTS,
    "Reward functions": REWARDS,
}


def render(page: str) -> str:
    """The page with the table of each section as the catalogue has it."""
    for section, cases in SECTIONS.items():
        rows = "".join(f"| {case.what} | {case.outcome} |\n" for case in cases)
        table = f"| case | outcome |\n|---|---|\n{rows}"
        page = re.sub(rf"(^## {section}\n\n[^|]*)(?:\|.*\n)+", lambda m, t=table: m[1] + t, page, flags=re.MULTILINE)
    return page
