"""Findings about a run: a cause with its evidence, the fix, and the experiment that proves it. Codes are stable."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from covey.runtime.files import written_whole

CODES = {
    "memory": "the run does not fit into memory",
    "tokenizer-drift": "the tokenizer is not the model's",
    "data-columns": "a reward reads a column that is missing, constant or of other rows",
    "reward-failing": "a reward function fails, or gives no reward",
    "engine-mismatch": "the engine samples from another policy than the one that is trained",
    "prompt-round-trip": "prompts lose text or control tokens on their way to the model",
    "template": "prompts are not written as the model expects them",
    "never-ends": "completions never end, though there is room",
    "reward-length": "the reward is explained by length alone",
    "completions-cut": "max_completion_length is too small",
    "temperature-low": "the samples of a group are alike",
    "reward-order": "a reward depends on the order of the batch or of calls",
    "reward-constant": "a reward is the same whatever the completion",
    "reward-saturated": "completions get the full reward already",
    "reward-unreachable": "no completion gets the reward",
    "reward-scale": "one reward function drowns the others",
    "groups-small": "groups are too small",
    "signal-sparse": "few groups have a signal",
    "kl-scale": "the KL penalty outweighs the reward",
    "learning-rate-high": "updates destroy the policy",
    "learning-rate-low": "updates hardly change the policy",
    "reward-slow": "rewards take most of a step",
    "tools-unused": "no rollout calls a tool",
    "tools-malformed": "calls of tools cannot be read",
    "tools-failing": "tools fail",
    "tools-budget": "rollouts run out of rounds of calls",
    "tools-slow": "rollouts wait for tools",
}
"""Code: title. A cause stands before its consequences."""

LEVELS = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """A cause of trouble in a run."""

    code: str  # a key of `CODES`
    level: str  # "error": the run cannot learn as it is; "warning": it may not; "note": worth knowing
    evidence: str  # what was measured
    fix: str  # a field and its value, or what to change
    proof: str = ""  # the experiment that was made: what the fix changes, in numbers

    def __str__(self) -> str:
        lines = [f"{self.level} {self.code}: {CODES[self.code]}", f"  evidence: {self.evidence}", f"  fix: {self.fix}"]
        return "\n".join([*lines, *([f"  proof: {self.proof}"] if self.proof else [])])

    @property
    def sentence(self) -> str:
        return f"{self.evidence} {self.fix}"

    def as_dict(self) -> dict[str, Any]:
        return {"title": CODES[self.code], **asdict(self)}


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """The gravest first, and of the same level causes before their consequences; one for each code."""
    order = {code: place for place, code in enumerate(CODES)}
    best: dict[str, Finding] = {}
    for finding in sorted(findings, key=lambda one: (LEVELS.index(one.level), order[one.code])):
        best.setdefault(finding.code, finding)
    return list(best.values())


def write_findings(path: Path, findings: Iterable[Finding]) -> None:
    with written_whole(path) as new:
        new.write_text(json.dumps([finding.as_dict() for finding in findings], indent=1))
