"""Fields and rules about teachers: models that score the policy's own tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from covey.algorithms import LOSS_TYPES
from covey.config.fields import Args, check_schedule, describe_fields, limited
from covey.config.messages import ignored
from covey.config.teacher_sources import is_loaded, is_server
from covey.core.findings import Finding

SECONDS: dict[str, Any] = {"gt": 0, "le": 10**9, "advice": "It is in seconds."}
OF_SERVERS = ("api_key", "timeout", "request_timeout", "concurrency")
"""Fields `teacher_server_{name}`."""


@dataclass
class TeacherFields:
    """Teachers: distillation of another model, or of the policy itself with another prompt."""

    teacher: dict[str, str] | str | None = None
    """The teacher, a model that scores the tokens that the policy has sampled: a folder or hub id; `start`, the policy
    at the start of the run (under a new adapter: the base model, which takes no memory); `policy`, the policy itself
    with another prompt; `follower`, the policy of some steps ago, or a moving average of it; the URL of a vLLM or
    SGLang server with the teacher's model (several with commas between them); the folder or hub id of a PEFT adapter.
    Or several by name, as JSON, from which rows choose by `teacher_column`."""
    teacher_model_init_kwargs: dict[str, Any] | str | None = None
    """Arguments of `from_pretrained` for teachers that are loaded, such as dtype or quantization_config."""
    teacher_model_revision: str | None = None
    """Revision of a teacher from the hub."""
    teacher_column: str = "teacher"
    """Column with the name of a row's teacher, where there are several. A row without a name has none."""
    teacher_prompt: str | None = None
    """Column with the prompt (text or messages) that the teacher reads instead of the row's. A row without one has no
    teacher."""
    teacher_prompt_template: str | None = None
    """Template of the prompt that the teacher reads instead: text with {prompt}, the row's own (of messages: the last
    one), and any of {context} (column `privileged_context`), {solution} (a rewarded answer of the group), {feedback} (a
    column, or what the environment said) and other columns; or path/to/file.py:name, a function of `TeacherPrompt`. A
    rollout for which one of them is missing has no teacher."""
    teacher_success_reward: float = 1.0
    """With {solution}: smallest total reward of an answer that the teacher is shown while it scores the others."""
    teacher_loss: str = limited("advantage", choices=("advantage", "divergence"))
    """`advantage`: the teacher's log-prob minus the policy's is added to each token's advantage. `divergence`: a term
    of its own in the loss, averaged over the tokens that have a teacher."""
    teacher_top_k: int = limited(0, ge=-1, advice="20 to 100 are usual; 0: the sampled token alone, -1: all tokens.")
    """`divergence`: number of tokens at each position whose probabilities under policy and teacher are compared; all
    others share one bin. They are the teacher's likeliest for the forward KL, the policy's for the reverse KL, and half
    of each in between. 0: only the sampled token, for the reverse KL. -1: the whole vocabulary, exactly."""
    teacher_beta: float = limited(1.0, ge=0, le=1, advice="1 is the reverse KL, 0 the forward KL, 0.5 JSD.")
    """`divergence` with teacher_top_k: 1 is the reverse KL, KL(policy || teacher); 0 the forward KL; in between, the
    generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649, eq. 1), which vanishes as beta approaches 0 or 1."""
    teacher_advantage: str | None = None
    """A function of the gap and the advantages, path/to/file.py:name, used instead of their weighted sum
    (`covey.core.distillation.GapInputs` lists its inputs)."""
    teacher_coef: float = limited(1.0, ge=0, finite=True, advice="1.0 is the default; 0 measures the teacher alone.")
    """Weight of the teacher; 0 measures it without learning from it."""
    teacher_schedule: dict[str, float] | str | None = None
    """Factor of `teacher_coef` by optimizer step: {"warmup": steps, "peak": a, "decay": steps, "valley": b}, linear
    from 0 to the peak, then along a cosine to the valley."""
    teacher_clip: float | None = limited(None, gt=0, advice="1 to 10 nats are usual.")
    """Bound of the gap between the teacher's log-prob and the policy's, in nats: it is clipped to [-teacher_clip,
    teacher_clip]. Unset: no bound."""
    teacher_mixup_alpha: float = limited(1.0, gt=0, le=1, advice="1.0 copies; 0.05 averages.")
    """Of `follower`: teacher = (1 - alpha) * teacher + alpha * policy."""
    teacher_sync_steps: int = limited(1, ge=1)
    """Of `follower`: optimizer steps from one move to the next."""
    teacher_server_api_key: str | None = None
    """Key of the teachers that are servers. Unset: the environment variable VLLM_API_KEY or SGLANG_API_KEY, where no
    log shows it."""
    teacher_server_timeout: float = limited(240.0, **SECONDS)
    """Seconds to wait for a teacher's servers to be up: at the start, and again when all of them have failed."""
    teacher_server_request_timeout: float = limited(800.0, **SECONDS)
    """Seconds that the log-probs of one rollout may take at a teacher's server before another one is asked."""
    teacher_server_concurrency: int = limited(64, ge=1, advice="16 to 64 keep a GPU busy.")
    """Most rollouts that are scored at once at one server of a teacher."""


describe_fields(__name__)

# ---- rules -----------------------------------------------------------------------------------------------------------


def teacher_schedule_is_whole(args: Args) -> Iterator[Finding]:
    yield from check_schedule("teacher_schedule", args.teacher_schedule)


def teachers_are_named(args: Args) -> Iterator[Finding]:
    given = args.teacher
    texts = [*given, *given.values()] if isinstance(given, dict) else []
    if isinstance(given, dict) and not (texts and all(isinstance(one, str) and one for one in texts)):
        yield Finding.error(
            "teacher-unknown",
            f"teacher={given!r} must map names to folders, hub ids, URLs of servers, 'start', 'policy' or 'follower'.",
            'Write teacher={"math": "folder-of-one", "code": "folder-of-another"}.',
        )


def teachers_read_a_prompt(args: Args) -> Iterator[Finding]:
    kinds = [*args.teachers.values()]
    own = args.teacher_prompt or args.teacher_prompt_template
    if args.teacher_prompt and args.teacher_prompt_template:
        yield Finding.error(
            "settings-contradict",
            f"teacher_prompt={args.teacher_prompt!r} and teacher_prompt_template={args.teacher_prompt_template!r} are"
            " two prompts for one teacher.",
            "Leave one of them out; a template reads columns by their names.",
        )
    if "policy" in kinds and not own:
        yield Finding.error(
            "teacher-itself",
            "teacher='policy' without a prompt of its own compares the policy with itself: every gap is 0.",
            "Name the column with the teacher's prompt (teacher_prompt), or give a teacher_prompt_template.",
        )


def teachers_on_servers_score_all_tokens(args: Args) -> Iterator[Finding]:
    served = next((source for source in args.teachers.values() if is_server(source)), None)
    if served is not None and args.teacher_loss == "divergence" and args.teacher_top_k < 0:
        yield Finding.error(
            "settings-contradict",
            f"teacher_top_k={args.teacher_top_k} with teacher={served!r}: a server names its likeliest tokens, and not"
            " the whole vocabulary.",
            "Set teacher_top_k=20, or load the teacher by its folder or hub id.",
        )
    if served is not None and args.keep_sampling_mask:
        yield Finding.error(
            "settings-contradict",
            f"keep_sampling_mask=True with teacher={served!r}: a server gives log-probs over all tokens, and the"
            " policy's are over those that each token was sampled from.",
            "Load the teacher by its folder or hub id, or set keep_sampling_mask=False.",
        )


def teachers_name_tokens(args: Args) -> Iterator[Finding]:
    """Another divergence than the reverse KL needs more than the sampled token."""
    if args.teacher_loss == "divergence" and args.teacher_beta != 1 and not args.teacher_top_k:
        yield Finding.error(
            "settings-contradict",
            f"teacher_beta={args.teacher_beta:g} with teacher_top_k=0: from the sampled token alone only the reverse KL"
            " (teacher_beta=1) has a gradient.",
            "Set teacher_top_k=-1 (the whole vocabulary) or 64, or leave teacher_beta at 1.",
        )


def teachers_credit_tokens(args: Args) -> Iterator[Finding]:
    """The teacher's gap is an advantage of each token; some losses use one advantage for a whole completion."""
    shares = args.importance_sampling_level == "sequence" and not LOSS_TYPES[args.loss_type].credits_tokens
    shares = shares and LOSS_TYPES[args.loss_type].ratio_level is None
    if args.teacher is not None and args.teacher_loss == "advantage" and (args.loss_type == "gmpo" or shares):
        yield Finding.error(
            "advantages-tokens",
            "teacher_loss='advantage' gives each token an advantage of its own, but this loss gives all tokens of a"
            " completion the same (loss_type='gmpo', or importance_sampling_level='sequence').",
            "Set teacher_loss='divergence', importance_sampling_level='sequence_token' or 'token', or choose another"
            " loss_type.",
        )


def teacher_options_are_read(args: Args) -> Iterator[Finding]:
    kinds = [*args.teachers.values()]
    if not kinds:
        return  # `check_unread` says so, once it is known that the trainer was given none either
    if "follower" not in kinds:
        yield from ignored(args, ["teacher_mixup_alpha", "teacher_sync_steps"], "no teacher is the 'follower'")
    if not any(map(is_loaded, kinds)):
        yield from ignored(args, ["teacher_model_init_kwargs", "teacher_model_revision"], "no teacher is loaded")
    if not any(map(is_server, kinds)):
        yield from ignored(args, [f"teacher_server_{name}" for name in OF_SERVERS], "no teacher is a server")
    if isinstance(args.teacher, str):
        yield from ignored(args, ["teacher_column"], "there is one teacher, which all rows have")
    if args.teacher_loss == "advantage":
        yield from ignored(args, ["teacher_top_k", "teacher_beta"], "teacher_loss is 'advantage'")
    elif args.teacher_top_k:
        yield from ignored(args, ["teacher_clip"], "teacher_top_k compares distributions, not the sampled tokens")
    if args.teacher_loss != "advantage":
        yield from ignored(args, ["teacher_advantage"], f"teacher_loss is {args.teacher_loss!r}")
    if "{solution}" not in (args.teacher_prompt_template or "") and ".py" not in (args.teacher_prompt_template or ""):
        yield from ignored(args, ["teacher_success_reward"], "the teacher's prompt has no {solution}")
