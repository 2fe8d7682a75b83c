"""Findings about a run: a cause with its evidence, the fix, and the experiment that proves it. Codes are stable.

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
    "setting-word": Code(CONFIG, "a setting names something that is not known"),
    "setting-format": Code(CONFIG, "a setting cannot be read"),
    "setting-unread": Code(CONFIG, "a setting has no effect"),
    "setting-elsewhere": Code(CONFIG, "a key of a dict belongs into a field"),
    "settings-contradict": Code(CONFIG, "two settings say different things"),
    "run-incomplete": Code(CONFIG, "a run names no model, dataset or reward"),
    "run-file": Code(CONFIG, "a run file cannot be read"),
    "study-setting": Code(CONFIG, "a setting is the study's, not a variant's"),
    "study-table": Code(CONFIG, "variants cannot play each other"),
    "study-adapter": Code(CONFIG, "an adapter cannot be sampled together with others"),
    "secret-in-url": Code(CONFIG, "a URL holds a password"),
    # batches and updates
    "launcher-variables": Code(CONFIG, "environment variables of a launcher are incomplete"),
    "gpus-in-one-process": Code(CONFIG, "one process sees several GPUs"),
    "group-of-one": Code(CONFIG, "a completion has no others to be compared with"),
    "batch-search": Code(CONFIG, "the batch size would change in the middle of a run"),
    "batch-split": Code(CONFIG, "batches would be cut within groups"),
    "batch-groups": Code(CONFIG, "a batch is no whole number of groups"),
    "game-cut": Code(CONFIG, "a game would be cut"),
    "batch-micro-batches": Code(CONFIG, "a rollout batch is no whole number of micro-batches"),
    "nothing-trained": Code(CONFIG, "nothing would be trained"),
    "optimizer-in-backward": Code(CONFIG, "the optimizer changes weights between micro-batches"),
    "embedding-noise": Code(CONFIG, "sampling and training models would differ by noise"),
    "updates-repeat": Code(CONFIG, "the same gradient is computed several times"),
    "updates-mix": Code(CONFIG, "an update mixes two rollout batches"),
    "optimizer-sharded": Code(CONFIG, "an optimizer cannot work with weights that are sharded so"),
    "bf16-emulated": Code(CONFIG, "the hardware does not multiply bfloat16"),
    # sampling
    "sampling-mask": Code(CONFIG, "sampling masks cannot be kept"),
    "draft-reuse": Code(CONFIG, "earlier completions cannot be reused"),
    "routing-replay": Code(CONFIG, "routes of experts cannot be replayed in such a run"),
    "async-sampling": Code(CONFIG, "rollouts cannot be sampled ahead of training"),
    "async-uncorrected": Code(CONFIG, "stale samples are trained on as if they were fresh"),
    "async-sleep": Code(CONFIG, "servers that sample ahead hardly sleep"),
    # the objective
    "loss-method": Code(CONFIG, "a loss belongs to another method"),
    "loss-length": Code(CONFIG, "a loss divides by a length that is not set"),
    "loss-on-policy": Code(CONFIG, "a penalty never acts in an on-policy run"),
    "clip-range": Code(CONFIG, "clipping leaves no range around 1"),
    "clip-cap": Code(CONFIG, "the largest ratio of cispo is not set, or too small"),
    "ratio-length": Code(CONFIG, "completions count by their length"),
    "advantages-twice": Code(CONFIG, "two ways lead from rewards to advantages"),
    "roles-unfiltered": Code(CONFIG, "groups would be filtered for what none of them lacks"),
    "advantages-tokens": Code(CONFIG, "a loss ignores the advantages of tokens"),
    "reference-missing": Code(CONFIG, "a reference model is needed and none is loaded"),
    "kl-form": Code(CONFIG, "the KL penalty has another form here"),
    "kl-dropped": Code(CONFIG, "the KL penalty is left out"),
    "entropy-range": Code(CONFIG, "the adaptive weight of the entropy has no room"),
    "reward-weights": Code(CONFIG, "weights of rewards do not weigh them"),
    # teachers
    "teacher-unknown": Code(CONFIG, "a teacher is named that there is not"),
    "teacher-itself": Code(CONFIG, "a teacher is the policy itself, reading the same prompt"),
    # engines
    "engines-several": Code(CONFIG, "more than one engine would sample"),
    "correction-bounds": Code(CONFIG, "bounds of the mismatch correction do not enclose 1"),
    "correction-level": Code(CONFIG, "the mismatch correction works on tokens here"),
    "engine-dtype-uncorrected": Code(CONFIG, "samples of rounded weights are trained on as if they were exact"),
    # datasets
    "dataset-missing": Code(DATA, "there are no rows to train on or to evaluate with"),
    "dataset-type": Code(DATA, "what was given is no dataset"),
    "dataset-empty": Code(DATA, "a dataset has no rows"),
    "dataset-split": Code(DATA, "a dataset has no such split"),
    "column-names": Code(DATA, "columns cannot be renamed so"),
    "dataset-small": Code(DATA, "the dataset does not fill one rollout batch"),
    "dataset-remainder": Code(DATA, "some rows never come"),
    "stream-endless": Code(DATA, "a stream has no end, and the run none either"),
    "stream-lookup": Code(DATA, "rows of a stream cannot be looked up by their number"),
    "stream-epochs": Code(DATA, "nothing happens at the end of a stream's epochs"),
    "source-name": Code(DATA, "settings of sources and their data sets do not go together"),
    "source-setting": Code(DATA, "a setting of a source cannot work"),
    "source-weights": Code(DATA, "weights of sources do not say how often each comes"),
    "source-small": Code(DATA, "a source has fewer rows than a rollout batch draws of it"),
    "source-rare": Code(DATA, "some rollout batches have no prompt of a source"),
    "source-column": Code(DATA, "a column has the name that rows' sources are kept under"),
    "source-drowned": Code(RUNNING, "a source counts for much more or less than its share of the prompts"),
    "source-reward": Code(DATA, "nothing rewards the rows of a source"),
    "row-type": Code(DATA, "a row is no dictionary of named columns"),
    "row-unread": Code(DATA, "a row, or what the model reads of it, cannot be read"),
    "column-prompt": Code(DATA, "there is no column `prompt`"),
    "column-reserved": Code(DATA, "a column has the name of an argument"),
    "column-misspelt": Code(DATA, "a column's name is nearly that of an argument"),
    "column-unread": Code(DATA, "nothing reads a column"),
    "mark-unread": Code(DATA, "a mark of a function has no effect"),
    "prompt-instructions": Code(DATA, "instructions of an environment are in no prompt"),
    "column-reset": Code(DATA, "an environment asks for a column that is not there"),
    "column-order": Code(DATA, "rows cannot be ordered by a column"),
    "column-tools": Code(DATA, "a column of tools and the run's tools do not go together"),
    "prompt-type": Code(DATA, "a prompt is neither text nor messages"),
    "prompt-json": Code(DATA, "a prompt is a list of messages written as text"),
    "prompt-surrogate": Code(DATA, "a prompt holds half of a character"),
    "prompt-mixture": Code(DATA, "some prompts are text and others messages"),
    "prompt-text": Code(DATA, "prompts of text skip the chat template"),
    "prompt-messages": Code(DATA, "tools and environments need prompts of messages"),
    "prompt-images": Code(DATA, "a program cannot be shown images"),
    "prompt-role": Code(DATA, "a role is one that chat templates seldom know"),
    "environment-name": Code(DATA, "a row names no environment"),
    "teacher-name": Code(DATA, "a row names a teacher that there is not"),
    "teacher-column": Code(DATA, "a column that a teacher reads is not there"),
    "teacher-nothing": Code(DATA, "no rollout has a teacher"),
    "reward-twice": Code(DATA, "a reward function is there twice"),
    "best-metric": Code(DATA, "no evaluation has the metric that chooses the best model"),
    # evaluation suites
    "suite-setting": Code(DATA, "a setting of an evaluation suite cannot work"),
    "suite-unread": Code(DATA, "a setting of an evaluation suite has no effect"),
    "suite-reward": Code(DATA, "an evaluation suite does not know which reward tells what is right"),
    "suite-answer": Code(DATA, "an evaluation suite does not know the answer of a completion"),
    # rewards
    "reward-missing": Code(DATA, "there is no reward function"),
    "reward-type": Code(DATA, "what was given is no reward function"),
    "reward-isolation": Code(DATA, "a reward function cannot run in a process of its own"),
    "reward-model": Code(MODEL, "a reward model, or its tokenizer, cannot be used"),
    # engines
    "sampling-in-step": Code(ENGINE, "processes that read images cannot sample in step"),
    "seat-sharded": Code(ENGINE, "a frozen copy of a sharded model is needed"),
    "seat-async": Code(ENGINE, "an earlier policy is needed while a later one is trained"),
    "engine-dtype": Code(ENGINE, "the engine cannot round to this number format here"),
    "engine-dtype-slow": Code(ENGINE, "rounding does not make decoding faster on this machine"),
    "server-sleep": Code(ENGINE, "one process would put a server to sleep for all"),
    "server-start": Code(ENGINE, "a server cannot be started for this run"),
    "teacher-server": Code(ENGINE, "a server does not score tokens as a teacher of this run has to"),
    "tensor-parallel": Code(ENGINE, "parts of a model do not divide the processes"),
    "adapter-alone": Code(ENGINE, "an adapter cannot be sent alone"),
    "weights-whole": Code(ENGINE, "weights cannot be sent as a checkpoint"),
    "replay-self": Code(ENGINE, "a run would replay the record that it writes"),
    # rollouts
    "players-several": Code(MODEL, "more than one thing would play the rollouts"),
    "player-type": Code(MODEL, "tools, a rollout function or environments are of another kind"),
    "template-tools": Code(MODEL, "the chat template does not show tools"),
    "game-seats": Code(MODEL, "seats of a game and rollouts per game do not go together"),
    "environment-fails": Code(MODEL, "an environment cannot be made"),
    "environment-methods": Code(MODEL, "an environment lacks a method, or has one that is nearly known"),
    # models and what trains them
    "model-type": Code(MODEL, "what was given is no causal language model"),
    "model-weights": Code(MODEL, "a model lacks trained weights"),
    "model-frozen": Code(MODEL, "no weight of the model is trained"),
    "model-part": Code(MODEL, "a part of the model cannot be frozen"),
    "model-dtype": Code(MODEL, "weights of this type cannot be trained well"),
    "model-generation": Code(MODEL, "the model's generation config cannot be saved"),
    "model-layout": Code(MODEL, "a layout does not suit the model"),
    "model-head": Code(MODEL, "the model's head cannot be computed as asked"),
    "model-experts": Code(MODEL, "the load of the experts cannot be balanced"),
    "model-routes": Code(MODEL, "the experts of the model's tokens cannot be read"),
    "model-arguments": Code(MODEL, "arguments of loading do not go with the model"),
    "quantised-weights": Code(MODEL, "quantised weights cannot be used so"),
    "adapter-type": Code(MODEL, "an adapter cannot be trained here"),
    "tokenizer-type": Code(MODEL, "what was given is no tokenizer of the model"),
    "tokenizer-missing": Code(MODEL, "the model's tokenizer cannot be found"),
    "context-length": Code(MODEL, "completions and the model's context do not go together"),
    "reward-tokens": Code(MODEL, "rewards look for special tokens"),
    "teacher-tokenizer": Code(MODEL, "a teacher has another tokenizer than the policy"),
    "teacher-vocabulary": Code(MODEL, "a teacher has no logits for some tokens"),
    "teacher-head": Code(MODEL, "the whole vocabulary cannot be compared with this teacher's head"),
    "teacher-layout": Code(MODEL, "a teacher cannot read prompts of its own here"),
    "teacher-adapter": Code(MODEL, "an adapter cannot be a teacher here"),
    "optimizer-weights": Code(MODEL, "an optimizer holds other weights than those that are trained"),
    "weights-rounded": Code(MODEL, "updates of weights in half precision are rounded away"),
    "attention-cpu": Code(MODEL, "an attention cannot be trained on a CPU"),
    "callback-event": Code(MODEL, "a method of a callback is never called"),
    # the machine and the hub
    "threads-spin": Code(RUNNING, "threads do not sleep where other programs need the cores"),
    "push-failed": Code(RUNNING, "the hub has not got a checkpoint"),
    "teacher-changed": Code(RUNNING, "a teacher has another model than in the run's checkpoint"),
    # games
    "roles-missing": Code(RUNNING, "rollouts are compared by roles that they do not have"),
    "roles-alone": Code(RUNNING, "no rollout has another one to be compared with"),
    "roles-few": Code(RUNNING, "too few rollouts are compared with each other"),
    "roles-unknown": Code(RUNNING, "a comparison names a role that no rollout has"),
    "roles-zero-sum": Code(RUNNING, "prompts are selected by rewards that cancel"),
}
"""Mistakes that a check recognises with certainty."""

DIAGNOSED = {
    "memory": Code(MODEL, "the run does not fit into memory"),
    "tokenizer-drift": Code(MODEL, "the tokenizer is not the model's"),
    "prompt-empty": Code(DATA, "prompts hold no text"),
    "data-order": Code(DATA, "the order of the rows hides a part of them from the run"),
    "data-columns": Code(DATA, "a reward reads a column that is missing, constant or of other rows"),
    "data-contradicts": Code(DATA, "prompts have several right answers in the data"),
    "reward-failing": Code(RUNNING, "a reward function fails, or gives no reward"),
    "routes-differ": Code(ENGINE, "engine and trainer send tokens to other experts"),
    "engine-mismatch": Code(ENGINE, "the engine samples from another policy than the one that is trained"),
    "prompt-round-trip": Code(DATA, "prompts lose text or control tokens on their way to the model"),
    "template": Code(DATA, "prompts are not written as the model expects them"),
    "never-ends": Code(RUNNING, "completions never end, though there is room"),
    "weights-frozen": Code(MODEL, "hardly any weight is trained, or none stays trained"),
    "reward-length": Code(RUNNING, "the reward is explained by length alone"),
    "reward-repeats": Code(RUNNING, "saying a thing again is paid again"),
    "completions-cut": Code(RUNNING, "max_completion_length is too small"),
    "temperature-low": Code(RUNNING, "the samples of a group are alike"),
    "reward-order": Code(RUNNING, "a reward depends on the order of the batch or of calls"),
    "reward-sign": Code(RUNNING, "wrong answers get more than right ones"),
    "reward-constant": Code(RUNNING, "a reward is the same whatever the completion"),
    "reward-saturated": Code(RUNNING, "completions get the full reward already"),
    "reward-unreachable": Code(RUNNING, "no completion gets the reward"),
    "reward-scale": Code(RUNNING, "one reward function drowns the others"),
    "groups-small": Code(RUNNING, "groups are too small"),
    "signal-sparse": Code(RUNNING, "few groups have a signal"),
    "role-silent": Code(RUNNING, "nothing is learnt in a role"),
    "kl-scale": Code(RUNNING, "the KL penalty or the entropy bonus outweighs the reward"),
    "learning-rate-high": Code(RUNNING, "updates destroy the policy"),
    "learning-rate-low": Code(RUNNING, "updates hardly change the policy"),
    "collapse": Code(RUNNING, "completions have become alike"),
    "reward-lost": Code(RUNNING, "a reward that was there has died"),
    "reward-slow": Code(RUNNING, "rewards take most of a step"),
    "tools-unused": Code(RUNNING, "no rollout calls a tool"),
    "tools-malformed": Code(RUNNING, "calls of tools cannot be read"),
    "tools-failing": Code(RUNNING, "tools fail"),
    "tools-budget": Code(RUNNING, "rollouts run out of rounds of calls"),
    "tools-slow": Code(RUNNING, "rollouts wait for tools"),
    "teacher-disagrees": Code(RUNNING, "the teacher disagrees with the policy about everything"),
    "eval-overlap": Code(DATA, "evaluation prompts are training prompts"),
    "eval-differs": Code(DATA, "evaluation prompts have another system message"),
    "answer-in-prompt": Code(DATA, "the right answer stands in the prompt"),
    "data-repeated": Code(DATA, "rows of the dataset repeat"),
}
"""Causes of poor learning that `covey doctor` looks for in samples and records, a cause before its consequences."""

CODES = {**CHECKED, **DIAGNOSED}


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
    """A diagnosis with evidence and a fix."""

    code: str  # a key of `CODES`
    level: str  # "error": the run cannot start, or learn, as it is; "warning": it may not; "note": worth knowing
    evidence: str  # what was given and what is allowed, or what was measured
    fix: str  # a field and its value, or what to change; "" where the evidence says it
    proof: str = ""  # the experiment that was made: what the fix changes, in numbers
    effect: Effect | None = None  # of the fix in that experiment; None where there was none
    otherwise: str = ""  # the advice where the experiment refutes the fix; "": there is no finding then

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
        """The finding without a fix that its own experiment refutes."""
        if self.effect is None or self.effect.improves:
            return self
        return replace(self, fix=self.otherwise, effect=None) if self.otherwise else None

    def __str__(self) -> str:
        title = CODES[self.code].title
        lines = [f"{self.level} {self.code}: {title}", f"  evidence: {self.evidence}", f"  fix: {self.fix}"]
        return "\n".join([*lines, *([f"  proof: {self.proof}"] if self.proof else [])])

    @property
    def sentence(self) -> str:
        return f"{self.evidence} {self.fix}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        shown = ("code", "level", "evidence", "fix", "proof")
        return {"title": CODES[self.code].title, **{name: getattr(self, name) for name in shown}}


class CheckError(ValueError):
    """Errors that checks have found: one, or several that are named together."""

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
        """The error of what cannot be read any further, where a check would have to continue without a value."""
        return cls(Finding.error(code, evidence, fix))

    def within(self, place: str) -> Self:
        """The same errors of a part, whose name begins each sentence."""
        return type(self)(*(replace(one, evidence=f"{place}: {one.evidence}") for one in self.findings))

    @property
    def codes(self) -> list[str]:
        return [finding.code for finding in self.findings]


class CheckWarning(UserWarning):
    """Warning that a check has given."""

    def __init__(self, finding: Finding):
        super().__init__(finding)  # so that the class and `args` make it again, as pickle and others expect
        self.finding = finding

    def __str__(self) -> str:
        return self.finding.sentence


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
