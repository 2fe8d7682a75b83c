"""Findings about a run: a cause with its evidence, the fix, and the experiment that proves it. Codes are stable."""

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from covey.runtime.files import written_whole

CODES = {
    "memory": "the run does not fit into memory",
    "tokenizer-drift": "the tokenizer is not the model's",
    "prompt-empty": "prompts hold no text",
    "data-order": "the order of the rows hides a part of them from the run",
    "data-columns": "a reward reads a column that is missing, constant or of other rows",
    "reward-failing": "a reward function fails, or gives no reward",
    "engine-mismatch": "the engine samples from another policy than the one that is trained",
    "prompt-round-trip": "prompts lose text or control tokens on their way to the model",
    "template": "prompts are not written as the model expects them",
    "never-ends": "completions never end, though there is room",
    "weights-frozen": "hardly any weight is trained",
    "reward-length": "the reward is explained by length alone",
    "reward-repeats": "saying a thing again is paid again",
    "completions-cut": "max_completion_length is too small",
    "temperature-low": "the samples of a group are alike",
    "reward-order": "a reward depends on the order of the batch or of calls",
    "reward-sign": "wrong answers get more than right ones",
    "reward-constant": "a reward is the same whatever the completion",
    "reward-saturated": "completions get the full reward already",
    "reward-unreachable": "no completion gets the reward",
    "reward-scale": "one reward function drowns the others",
    "groups-small": "groups are too small",
    "signal-sparse": "few groups have a signal",
    "kl-scale": "the KL penalty outweighs the reward",
    "learning-rate-high": "updates destroy the policy",
    "learning-rate-low": "updates hardly change the policy",
    "collapse": "completions have become alike",
    "reward-lost": "a reward that was there has died",
    "reward-slow": "rewards take most of a step",
    "tools-unused": "no rollout calls a tool",
    "tools-malformed": "calls of tools cannot be read",
    "tools-failing": "tools fail",
    "tools-budget": "rollouts run out of rounds of calls",
    "tools-slow": "rollouts wait for tools",
    "eval-overlap": "evaluation prompts are training prompts",
    "eval-differs": "evaluation prompts have another system message",
    "answer-in-prompt": "the right answer stands in the prompt",
    "data-repeated": "rows of the dataset repeat",
}
"""Code: title. A cause stands before its consequences."""

LEVELS = ("error", "warning", "note")


@dataclass(frozen=True)
class Effect:
    """A figure that a finding is about, as it is and with the fix, by an experiment."""

    now: float
    then: float
    higher_is_better: bool = True

    @property
    def improves(self) -> bool:
        """False for equal figures and for unknown ones with the fix; anything improves on an unknown figure now."""
        if math.isnan(self.now) or math.isnan(self.then):
            return math.isnan(self.now) and not math.isnan(self.then)
        return self.then > self.now if self.higher_is_better else self.then < self.now


@dataclass(frozen=True)
class Finding:
    """A cause of trouble in a run."""

    code: str  # a key of `CODES`
    level: str  # "error": the run cannot learn as it is; "warning": it may not; "note": worth knowing
    evidence: str  # what was measured
    fix: str  # a field and its value, or what to change
    proof: str = ""  # the experiment that was made: what the fix changes, in numbers
    effect: Effect | None = None  # of the fix in that experiment; None where there was none
    otherwise: str = ""  # the advice where the experiment refutes the fix; "": there is no finding then

    @property
    def grave(self) -> bool:
        return self.level == "error"

    @property
    def supported(self) -> "Finding | None":
        """The finding without a fix that its own experiment refutes."""
        if self.effect is None or self.effect.improves:
            return self
        return replace(self, fix=self.otherwise, effect=None) if self.otherwise else None

    def __str__(self) -> str:
        lines = [f"{self.level} {self.code}: {CODES[self.code]}", f"  evidence: {self.evidence}", f"  fix: {self.fix}"]
        return "\n".join([*lines, *([f"  proof: {self.proof}"] if self.proof else [])])

    @property
    def sentence(self) -> str:
        return f"{self.evidence} {self.fix}"

    def as_dict(self) -> dict[str, Any]:
        shown = ("code", "level", "evidence", "fix", "proof")
        return {"title": CODES[self.code], **{name: getattr(self, name) for name in shown}}


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """The gravest first, and of the same level causes before their consequences; one for each code.

    No fix is proposed that its own experiment refutes.
    """
    order = {code: place for place, code in enumerate(CODES)}
    best: dict[str, Finding] = {}
    kept = [finding for one in findings if (finding := one.supported) is not None]
    for finding in sorted(kept, key=lambda one: (LEVELS.index(one.level), order[one.code])):
        best.setdefault(finding.code, finding)
    return list(best.values())


def read_findings(path: Path) -> list[dict[str, Any]]:
    """Findings of a file; none where it is missing or cannot be read."""
    with suppress(OSError, ValueError):
        return list(json.loads(path.read_text()))
    return []


def add_findings(path: Path, findings: Iterable[Finding]) -> None:
    """Add to the findings of a file; one that is there already is replaced by the new one of its code."""
    known = {one["code"]: one for one in read_findings(path)}
    known |= {finding.code: finding.as_dict() for finding in findings}
    with written_whole(path) as new:
        new.write_text(json.dumps([*known.values()], indent=1))


def write_findings(path: Path, findings: Iterable[Finding]) -> None:
    with written_whole(path) as new:
        new.write_text(json.dumps([finding.as_dict() for finding in findings], indent=1))
