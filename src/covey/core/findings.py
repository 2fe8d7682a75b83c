"""Findings about a run: a cause with evidence, a fix, and the experiment that proves it. Codes are stable.

A check is a function that yields findings; `covey.runtime.user_code.report` raises the errors among them and warns of
the rest. To add one: a code in `CHECKED`, the check next to the others of its stage, and a mistake in
tests/support/mistakes that it must find.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

STAGES = CONFIG, DATA, MODEL, ENGINE, RUNNING = "config", "data", "model", "engine", "running"
LEVELS = ("error", "warning", "note")


class Code(NamedTuple):
    """A row of the table of codes."""

    stage: str  # at which it can be known: `CONFIG`, `DATA`, `MODEL`, `ENGINE` or `RUNNING`
    title: str


CHECKED = {
    # settings by themselves
    "setting-type": Code(CONFIG, "a setting has a value of another type"),
    "setting-range": Code(CONFIG, "a setting is out of range"),
    "setting-word": Code(CONFIG, "a setting has an unknown value"),
    "setting-format": Code(CONFIG, "a setting cannot be read"),
    "setting-unread": Code(CONFIG, "a setting has no effect"),
    "setting-elsewhere": Code(CONFIG, "a key of a dictionary setting has a field of its own"),
    "settings-contradict": Code(CONFIG, "two settings say different things"),
    "run-incomplete": Code(CONFIG, "a run names no model, dataset or reward"),
    "run-file": Code(CONFIG, "a run file cannot be read"),
    "study-setting": Code(CONFIG, "a variant sets what only the study can set"),
    "study-table": Code(CONFIG, "variants cannot play each other"),
    "study-adapter": Code(CONFIG, "an adapter cannot be sampled in one batch with others"),
    "secret-in-url": Code(CONFIG, "a URL holds a password"),
    # batches and updates
    "launcher-variables": Code(CONFIG, "environment variables of a launcher are incomplete"),
    "gpus-in-one-process": Code(CONFIG, "one process sees several GPUs"),
    "group-of-one": Code(CONFIG, "a completion has no other to be compared with"),
    "batch-search": Code(CONFIG, "the batch size would change in the middle of a run"),
    "batch-split": Code(CONFIG, "batches would split groups"),
    "batch-groups": Code(CONFIG, "a batch is not a whole number of groups"),
    "game-cut": Code(CONFIG, "a game would be split over batches or processes"),
    "batch-micro-batches": Code(CONFIG, "a rollout batch is not a whole number of micro-batches"),
    "nothing-trained": Code(CONFIG, "nothing would be trained"),
    "optimizer-in-backward": Code(CONFIG, "the optimizer changes weights between micro-batches"),
    "embedding-noise": Code(CONFIG, "the model that samples and the one that trains would differ by noise"),
    "updates-repeat": Code(CONFIG, "the same gradient is computed several times"),
    "updates-mix": Code(CONFIG, "an update mixes two rollout batches"),
    "optimizer-sharded": Code(CONFIG, "an optimizer does not support this sharding of weights"),
    "bf16-emulated": Code(CONFIG, "the hardware has no bfloat16 products"),
    # sampling
    "sampling-mask": Code(CONFIG, "sampling masks cannot be kept"),
    "draft-reuse": Code(CONFIG, "earlier completions cannot be reused"),
    "routing-replay": Code(CONFIG, "routes of experts cannot be replayed in this run"),
    "async-sampling": Code(CONFIG, "rollouts cannot be sampled ahead of training"),
    "async-uncorrected": Code(CONFIG, "stale samples are trained on as if they were fresh"),
    "async-sleep": Code(CONFIG, "servers that sample ahead of training can hardly sleep"),
    # the objective
    "loss-method": Code(CONFIG, "a loss belongs to another method"),
    "loss-length": Code(CONFIG, "a loss divides by a length that is not set"),
    "loss-on-policy": Code(CONFIG, "a penalty never acts in an on-policy run"),
    "clip-range": Code(CONFIG, "clipping leaves no range around 1"),
    "clip-cap": Code(CONFIG, "the largest ratio of cispo is not set, or too small"),
    "ratio-length": Code(CONFIG, "completions are weighted by their length"),
    "advantages-twice": Code(CONFIG, "two settings define the advantages"),
    "roles-unfiltered": Code(CONFIG, "filtering groups by advantages would have no effect"),
    "advantages-tokens": Code(CONFIG, "a loss ignores the advantages of tokens"),
    "reference-missing": Code(CONFIG, "a reference model is needed and none is loaded"),
    "kl-form": Code(CONFIG, "the KL penalty has another form here"),
    "kl-dropped": Code(CONFIG, "the KL penalty is left out"),
    "entropy-range": Code(CONFIG, "the range of the adaptive entropy weight is empty"),
    "reward-weights": Code(CONFIG, "reward weights are not one finite number per reward"),
    # teachers
    "teacher-unknown": Code(CONFIG, "a teacher is named that is not defined"),
    "teacher-itself": Code(CONFIG, "a teacher is the policy itself, reading the same prompt"),
    # engines
    "engines-several": Code(CONFIG, "more than one engine would sample"),
    "correction-bounds": Code(CONFIG, "the bounds of the mismatch correction exclude 1"),
    "correction-level": Code(CONFIG, "the mismatch correction must work on tokens here"),
    "engine-dtype-uncorrected": Code(CONFIG, "samples of rounded weights are not corrected"),
    # datasets
    "dataset-missing": Code(DATA, "there are no rows to train on or to evaluate with"),
    "dataset-type": Code(DATA, "the argument is not a dataset"),
    "dataset-empty": Code(DATA, "a dataset has no rows"),
    "dataset-split": Code(DATA, "a dataset has no such split"),
    "column-names": Code(DATA, "columns cannot be renamed in this way"),
    "dataset-small": Code(DATA, "the dataset does not fill one rollout batch"),
    "dataset-remainder": Code(DATA, "some rows are never drawn"),
    "stream-endless": Code(DATA, "neither the stream nor the run has an end"),
    "stream-lookup": Code(DATA, "rows of a stream cannot be accessed by number"),
    "stream-epochs": Code(DATA, "nothing happens at the end of a stream's epochs"),
    "source-name": Code(DATA, "settings and datasets of sources do not match"),
    "source-setting": Code(DATA, "a setting of a source cannot work"),
    "source-weights": Code(DATA, "weights of sources do not define their shares"),
    "source-scales": Code(DATA, "some sources have a number as their weight, and others their number of rows"),
    "source-small": Code(DATA, "a source has fewer rows than a rollout batch draws from it"),
    "source-rare": Code(DATA, "some rollout batches have no prompt of a source"),
    "source-column": Code(DATA, "a column has the name that is reserved for the source of a row"),
    "source-drowned": Code(RUNNING, "a source weighs much more or less than its share of the prompts"),
    "source-reward": Code(DATA, "no reward function scores the rows of a source"),
    "row-type": Code(DATA, "a row is not a dictionary of named columns"),
    "row-unread": Code(DATA, "a row cannot be read or encoded"),
    "column-prompt": Code(DATA, "the column `prompt` is missing"),
    "column-reserved": Code(DATA, "a column has a reserved name"),
    "column-misspelt": Code(DATA, "a column's name is nearly the name of an argument"),
    "column-unread": Code(DATA, "a column is not used"),
    "mark-unread": Code(DATA, "a decorator of a function has no effect"),
    "prompt-instructions": Code(DATA, "no prompt contains the instructions of an environment"),
    "column-reset": Code(DATA, "an environment needs a column that is missing"),
    "column-order": Code(DATA, "rows cannot be ordered by a column"),
    "column-tools": Code(DATA, "a column of tools and the run's tools conflict"),
    "prompt-type": Code(DATA, "a prompt is neither text nor messages"),
    "prompt-json": Code(DATA, "a prompt is a list of messages written as text"),
    "prompt-surrogate": Code(DATA, "a prompt contains half of a surrogate pair"),
    "prompt-mixture": Code(DATA, "some prompts are text and others messages"),
    "prompt-text": Code(DATA, "prompts that are text skip the chat template"),
    "prompt-messages": Code(DATA, "tools and environments need prompts that are messages"),
    "prompt-images": Code(DATA, "a program cannot be shown images"),
    "prompt-role": Code(DATA, "a role is unknown to most chat templates"),
    "environment-name": Code(DATA, "a row does not name an environment of the run"),
    "teacher-name": Code(DATA, "a row names an unknown teacher"),
    "teacher-column": Code(DATA, "a column that a teacher reads is missing"),
    "teacher-nothing": Code(DATA, "no rollout has a teacher"),
    "reward-twice": Code(DATA, "a reward function is given twice"),
    "best-metric": Code(DATA, "no evaluation has the metric that chooses the best model"),
    # evaluation suites
    "suite-setting": Code(DATA, "a setting of an evaluation suite cannot work"),
    "suite-unread": Code(DATA, "a setting of an evaluation suite has no effect"),
    "suite-reward": Code(DATA, "an evaluation suite cannot tell which reward means right"),
    "suite-answer": Code(DATA, "an evaluation suite cannot read the answer of a completion"),
    # rewards
    "reward-missing": Code(DATA, "there is no reward function"),
    "reward-type": Code(DATA, "the argument is not a reward function"),
    "reward-isolation": Code(DATA, "a reward function cannot run in a process of its own"),
    "reward-model": Code(MODEL, "a reward model, or its tokenizer, cannot be used"),
    # engines
    "sampling-in-step": Code(ENGINE, "sharded models with images cannot be sampled in lockstep"),
    "seat-sharded": Code(ENGINE, "a frozen copy of a sharded model is needed"),
    "seat-async": Code(ENGINE, "an earlier policy is needed while a later one is trained"),
    "engine-dtype": Code(ENGINE, "the engine cannot round to this number format here"),
    "engine-dtype-slow": Code(ENGINE, "rounding does not make decoding faster on this machine"),
    "server-sleep": Code(ENGINE, "one process would put a server to sleep for all"),
    "server-start": Code(ENGINE, "a server cannot be started for this run"),
    "teacher-server": Code(ENGINE, "a server does not score tokens as a teacher of this run has to"),
    "tensor-parallel": Code(ENGINE, "the model cannot be divided over the processes"),
    "adapter-alone": Code(ENGINE, "an adapter cannot be sent without its base model"),
    "weights-whole": Code(ENGINE, "weights cannot be sent as a checkpoint"),
    "replay-self": Code(ENGINE, "a run would replay the record that it writes"),
    # rollouts
    "players-several": Code(MODEL, "several settings define how rollouts are played"),
    "player-type": Code(MODEL, "tools, a rollout function or environments have the wrong type"),
    "template-tools": Code(MODEL, "the chat template does not show tools"),
    "game-seats": Code(MODEL, "seats of a game and rollouts per game do not match"),
    "environment-fails": Code(MODEL, "an environment cannot be created"),
    "environment-methods": Code(MODEL, "an environment lacks a method, or has a misspelt one"),
    # models and what trains them
    "model-type": Code(MODEL, "the argument is not a causal language model"),
    "model-weights": Code(MODEL, "a model lacks trained weights"),
    "model-frozen": Code(MODEL, "no weight of the model would be trained"),
    "model-part": Code(MODEL, "a part of the model cannot be frozen"),
    "model-dtype": Code(MODEL, "weights of this dtype cannot be trained well"),
    "model-generation": Code(MODEL, "the model's generation config cannot be saved"),
    "model-layout": Code(MODEL, "a layout does not work with the model"),
    "model-head": Code(MODEL, "the model's head cannot be computed as asked"),
    "model-experts": Code(MODEL, "the load of the experts cannot be balanced"),
    "model-routes": Code(MODEL, "the experts of the model's tokens cannot be read"),
    "model-arguments": Code(MODEL, "arguments for loading do not suit the model"),
    "quantised-weights": Code(MODEL, "quantised weights cannot be used in this way"),
    "adapter-type": Code(MODEL, "an adapter cannot be trained here"),
    "tokenizer-type": Code(MODEL, "the argument is not a tokenizer for the model"),
    "tokenizer-missing": Code(MODEL, "the model's tokenizer cannot be found"),
    "context-length": Code(MODEL, "completions do not fit the model's context"),
    "reward-tokens": Code(MODEL, "rewards look for special tokens"),
    "teacher-tokenizer": Code(MODEL, "a teacher has another tokenizer than the policy"),
    "teacher-vocabulary": Code(MODEL, "a teacher has no logits for some tokens"),
    "teacher-head": Code(MODEL, "the whole vocabulary cannot be compared with this teacher's head"),
    "teacher-layout": Code(MODEL, "a teacher cannot have its own prompts here"),
    "teacher-adapter": Code(MODEL, "an adapter cannot be a teacher here"),
    "optimizer-weights": Code(MODEL, "an optimizer has weights other than the trained ones"),
    "weights-rounded": Code(MODEL, "updates of weights in half precision are lost by rounding"),
    "attention-cpu": Code(MODEL, "an attention implementation cannot be trained on a CPU"),
    "callback-event": Code(MODEL, "a method of a callback is never called"),
    # the machine and the hub
    "threads-spin": Code(RUNNING, "waiting threads take cores that other programs need"),
    "push-failed": Code(RUNNING, "a checkpoint was not uploaded to the hub"),
    "teacher-changed": Code(RUNNING, "a teacher is another model than in the run's checkpoint"),
    # games
    "roles-missing": Code(RUNNING, "rollouts are compared by roles, but have none"),
    "roles-alone": Code(RUNNING, "no rollout has another one to be compared with"),
    "roles-few": Code(RUNNING, "too few rollouts are compared with each other"),
    "roles-unknown": Code(RUNNING, "a comparison names a role that no rollout has"),
    "roles-zero-sum": Code(RUNNING, "prompts are selected by rewards that add up to 0"),
}
"""Mistakes that a check recognises with certainty."""

DIAGNOSED = {
    "memory": Code(MODEL, "the run does not fit into memory"),
    "tokenizer-drift": Code(MODEL, "the tokenizer belongs to another model"),
    "prompt-empty": Code(DATA, "prompts are empty"),
    "data-order": Code(DATA, "the run never sees some kinds of rows, because of their order"),
    "data-columns": Code(DATA, "a reward reads a column that is missing, constant or misaligned"),
    "data-contradicts": Code(DATA, "prompts have several right answers in the data"),
    "reward-failing": Code(RUNNING, "a reward function fails, or gives no reward"),
    "routes-differ": Code(ENGINE, "engine and trainer send tokens to other experts"),
    "engine-mismatch": Code(ENGINE, "the engine samples from another policy than the one that is trained"),
    "prompt-round-trip": Code(DATA, "prompts lose text or control tokens when they are encoded"),
    "template": Code(DATA, "prompts do not follow the model's chat format"),
    "never-ends": Code(RUNNING, "completions do not end, although there is room"),
    "weights-frozen": Code(MODEL, "hardly any weight is trained, or weights are put back"),
    "reward-length": Code(RUNNING, "the reward depends only on length"),
    "reward-repeats": Code(RUNNING, "repetition is rewarded"),
    "completions-cut": Code(RUNNING, "max_completion_length or max_turn_length is too small"),
    "temperature-low": Code(RUNNING, "samples of a group are almost equal"),
    "reward-order": Code(RUNNING, "a reward depends on the order of the batch or of calls"),
    "reward-sign": Code(RUNNING, "wrong answers get more reward than right ones"),
    "reward-constant": Code(RUNNING, "a reward is the same for every completion"),
    "reward-saturated": Code(RUNNING, "completions already get the full reward"),
    "reward-unreachable": Code(RUNNING, "no completion gets the reward"),
    "reward-scale": Code(RUNNING, "one reward function dominates the others"),
    "groups-small": Code(RUNNING, "groups are too small"),
    "signal-sparse": Code(RUNNING, "few groups have different rewards"),
    "role-silent": Code(RUNNING, "nothing is learned in a role"),
    "kl-scale": Code(RUNNING, "the KL penalty or the entropy bonus outweighs the reward"),
    "learning-rate-high": Code(RUNNING, "updates are too large and destroy the policy"),
    "learning-rate-low": Code(RUNNING, "updates hardly change the policy"),
    "collapse": Code(RUNNING, "completions have become alike"),
    "reward-lost": Code(RUNNING, "completions no longer get a reward that they got before"),
    "reward-slow": Code(RUNNING, "rewards take most of a step"),
    "tools-unused": Code(RUNNING, "no rollout calls a tool"),
    "tools-malformed": Code(RUNNING, "tool calls cannot be parsed"),
    "tools-failing": Code(RUNNING, "tools fail"),
    "tools-budget": Code(RUNNING, "rollouts use up their rounds of tool calls"),
    "tools-slow": Code(RUNNING, "rollouts wait for tools"),
    "teacher-disagrees": Code(RUNNING, "teacher and policy disagree on almost every token"),
    "eval-overlap": Code(DATA, "evaluation prompts are training prompts"),
    "eval-differs": Code(DATA, "evaluation prompts have another system message"),
    "answer-in-prompt": Code(DATA, "the prompt contains the right answer"),
    "data-repeated": Code(DATA, "rows of the dataset are duplicates"),
}
"""Causes of poor learning that `covey doctor` looks for in samples and records, a cause before its consequences."""

CODES = {**CHECKED, **DIAGNOSED}


@dataclass(frozen=True)
class Effect:
    """A number that a finding is about, measured by an experiment now and with the fix."""

    now: float
    then: float
    higher_is_better: bool = True

    @property
    def improves(self) -> bool:
        """True if the fix improves the number; a known number improves on an unknown one (NaN)."""
        if math.isnan(self.now) or math.isnan(self.then):
            return math.isnan(self.now) and not math.isnan(self.then)
        return self.then > self.now if self.higher_is_better else self.then < self.now


@dataclass(frozen=True)
class Finding:
    """A diagnosis with evidence and a fix."""

    code: str  # a key of `CODES`
    level: str  # "error": the run cannot start, or learn, as it is; "warning": it may not; "note": worth knowing
    evidence: str  # what was given and what is allowed, or what was measured
    fix: str  # a field and its value, or what to change; "" if the evidence already says it
    proof: str = ""  # the experiment that was made: what the fix changes, in numbers
    effect: Effect | None = None  # of the fix in that experiment; None without one
    otherwise: str = ""  # advice if the experiment refutes the fix; "": the finding is dropped then

    @classmethod
    def error(cls, code: str, evidence: str, fix: str = "") -> "Finding":
        return cls(code, "error", evidence, fix)

    @classmethod
    def warning(cls, code: str, evidence: str, fix: str = "") -> "Finding":
        return cls(code, "warning", evidence, fix)

    @property
    def grave(self) -> bool:
        return self.level == "error"

    @property
    def supported(self) -> "Finding | None":
        """The finding, with `otherwise` in place of a fix that the experiment refutes; None without other advice."""
        if self.effect is None or self.effect.improves:
            return self
        return replace(self, fix=self.otherwise, effect=None) if self.otherwise else None

    def __str__(self) -> str:
        title = CODES[self.code].title
        further = {"fix": self.fix, "proof": self.proof}
        lines = [f"{self.level} {self.code}: {title}", f"  evidence: {self.evidence}"]
        return "\n".join([*lines, *(f"  {name}: {text}" for name, text in further.items() if text)])

    @property
    def sentence(self) -> str:
        return f"{self.evidence} {self.fix}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        shown = ("code", "level", "evidence", "fix", "proof")
        return {"title": CODES[self.code].title, **{name: getattr(self, name) for name in shown}}


class CheckError(ValueError):
    """Errors found by checks: one, or several in one message."""

    def __init__(self, *findings: Finding):
        sentences = [finding.sentence for finding in findings]
        settings = all(CODES[one.code].stage == CONFIG for one in findings)
        head = f"{len(findings)} {'settings cannot work' if settings else 'things are wrong'}:"
        together = "\n".join([head, *(f"- {sentence}" for sentence in sentences)])
        super().__init__(sentences[0] if len(findings) == 1 else together)
        self.findings = findings

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.findings

    @classmethod
    def of(cls, code: str, evidence: str, fix: str = "") -> Self:
        """The error that ends a check which cannot continue without a value."""
        return cls(Finding.error(code, evidence, fix))

    def within(self, place: str) -> Self:
        """The same errors for a part of the run, whose name is put before each sentence."""
        return type(self)(*(replace(one, evidence=f"{place}: {one.evidence}") for one in self.findings))

    @property
    def codes(self) -> list[str]:
        return [finding.code for finding in self.findings]


class CheckWarning(UserWarning):
    """Warning given by a check."""

    def __init__(self, finding: Finding):
        super().__init__(finding)  # so that the class and `args` make it again, as pickle and others expect
        self.finding = finding

    def __str__(self) -> str:
        return self.finding.sentence


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Findings sorted by level and, within a level, causes before their consequences; one per code.

    What a check of the start warned of comes after causes of poor learning.
    Fixes that their own experiment refutes are not proposed (`Finding.supported`).
    """
    order = {code: place for place, code in enumerate([*DIAGNOSED, *CHECKED])}
    best: dict[str, Finding] = {}
    kept = [finding for one in findings if (finding := one.supported) is not None]
    for finding in sorted(kept, key=lambda one: (LEVELS.index(one.level), order[one.code])):
        best.setdefault(finding.code, finding)
    return list(best.values())
