"""Interactive use of a trainer: completions of its model, a one-line description, metrics as a table."""

import html
from collections.abc import Sequence
from typing import Any

from covey.core.records import PromptSample
from covey.core.transcript import as_text
from covey.data.conversations import as_user_messages
from covey.observability.metric_docs import meaning
from covey.rollout.collector import Collector
from covey.trainer.distributed.sharding import ready_to_evaluate


def generate(trainer: Any, prompts: Any, num_generations: int, seed: int | None, changes: dict[str, Any]) -> Any:
    params = trainer.rollouts.params.changed(changes, "generate")
    if isinstance(num_generations, bool) or not isinstance(num_generations, int) or num_generations < 1:
        raise ValueError(f"num_generations={num_generations!r} of `generate` must be a whole number, 1 or more.")
    if not isinstance(prompts, str | list | tuple) or not prompts:
        raise ValueError(f"`generate` was given {prompts!r:.80}: give a text, a list of messages, or a list of these.")
    ready_to_evaluate(trainer)
    alone = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], dict))
    rows = [{"prompt": prompt} for prompt in ([prompts] if alone else prompts)]
    rows = as_user_messages(rows) if trainer.args.prompts_as_messages else rows
    samples = [PromptSample(row, number, one) for number, row in enumerate(rows) for one in range(num_generations)]
    if seed is None:
        trainer.generations_asked += 1
        seed = trainer.generations_asked
    of_agents = trainer.collector  # which may play whole episodes, and is left alone
    collector = Collector(of_agents.engine, of_agents.codec, of_agents.seed)
    collector.run_by(of_agents.run)
    was_training = trainer.model.training
    trainer.model.eval()
    try:
        trainer.rollouts.send_weights("eval")
        rollouts = collector.collect(samples, params, ("generate", seed))
    finally:
        trainer.model.train(was_training)
    texts = [_text(rollout.completion) for rollout in rollouts]
    if num_generations == 1:
        return texts[0] if alone else texts
    groups = [texts[first : first + num_generations] for first in range(0, len(texts), num_generations)]
    return groups[0] if alone else groups


def _text(completion: Any) -> str:
    """The text of a completion; of messages, the text of a single one, else the transcript."""
    if isinstance(completion, list):
        contents = [message.get("content") for message in completion if isinstance(message, dict)]
        return contents[0] if len(contents) == 1 and isinstance(contents[0], str) else as_text(completion)
    return str(completion)


def describe(trainer: Any) -> str:
    """One line: the model, the rewards, how far the training is, and its folder."""
    kind = type(trainer).__name__
    try:
        model = getattr(trainer.policy.config, "_name_or_path", "") or type(trainer.policy).__name__
        rewards: Sequence[str] = trainer.rewards.names
        state, args = trainer.state, trainer.args
    except AttributeError:  # it is being made
        return f"<{kind}>"
    steps = f"step {state.global_step} of {state.max_steps}" if state.max_steps > 0 else "not trained yet"
    return f"{kind}(model={model!r}, rewards={', '.join(rewards)}, {steps}, output_dir={args.output_dir!r})"


class Metrics(dict[str, float]):
    """Metrics of an evaluation, which a notebook shows as a table with what each of them means."""

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{value:.4g}</td><td>{html.escape(meaning(name) or '')}</td></tr>"
            for name, value in self.items()
            if isinstance(value, int | float)
        )
        return (
            f"<table><thead><tr><th>metric</th><th>value</th><th>meaning</th></tr></thead><tbody>{rows}</tbody></table>"
        )
