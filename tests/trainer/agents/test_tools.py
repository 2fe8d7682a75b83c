"""Training with tools and rollout functions: what the trainer makes of them, from arguments to metrics."""

import pytest

from covey.core.records import FinishReason, Rollout
from covey.engines.scripted import ScriptedEngine
from covey.observability.record import files, read_rows
from covey.rollout.user_functions import RolloutError
from covey.trainer.rollout_reports import FailureMonitor
from tests.support import runs, tiny

ERROR = FinishReason.ERROR

# The chat template of tiny conversations, with tools in it and results.
TEMPLATE = (
    "{% for t in tools or [] %}<bos>tool: {{ t.function.name }}<eos>{% endfor %}"
    "{% for m in messages %}<bos>{{ m['role'] }}: {{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<bos>assistant: {% endif %}"
)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def tokenizer():
    made = tiny.tokenizer()
    made.chat_template = TEMPLATE
    return made


TOKENIZER = tokenizer()


def tokens(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def says(*turns):
    """A script: the n-th turn of a conversation says the n-th text, later ones the last, whoever asks."""

    def script(prompt_ids, seed):
        turn = TOKENIZER.decode(prompt_ids).count("<bos>tool: {") + TOKENIZER.decode(prompt_ids).count("<bos>tool: E")
        turn += sum(TOKENIZER.decode(prompt_ids).count(f"<bos>tool: {digit}") for digit in range(10))
        return [*tokens(turns[min(turn, len(turns) - 1)]), TOKENIZER.eos_token_id]

    return ScriptedEngine(script)


CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def trainer(folder, engine=None, method="grpo", seen=None, parts=None, **changes):
    def reward(completions, completion_ids, **kwargs):
        if seen is not None:
            seen.append(completions)
        return [len(ids) + sum(ids) % 10 / 10 for ids in completion_ids]

    arguments = {
        "processing_class": tokenizer(),
        "reward_funcs": reward,
        "train_dataset": tiny.rows(conversational=True),
        "engine": engine,
        **(parts or {}),
    }
    settings = {
        "max_completion_length": 150,
        "max_steps": 1,
        "engine_parity": "off",
        "export_completions": True,
        **changes,
    }
    return runs.trainer(folder, method, parts=arguments, **settings)


def test_turns_are_limited_and_chosen_by_the_config(tmp_path):
    """Call and answer, of which "55<eos>" alone is trained on; then a call that is cut off and not executed."""
    last = trainer(tmp_path, says(CALL, "55"), parts={"tools": [add]}, trained_turns="last")
    last.train()
    assert (
        last.state.log_history[0]["completions/mean_length"] == 3 and last.state.log_history[0]["rollouts/turns"] == 2
    )
    cut = trainer(tmp_path / "cut", says(CALL, "55"), parts={"tools": [add]}, max_turn_length=10)
    cut.train()
    logged = cut.state.log_history[0]
    assert (logged["completions/mean_length"], logged["completions/clipped_ratio"]) == (10, 1)
    with pytest.warns(UserWarning, match="`max_turn_length=5` has no effect"):
        trainer(tmp_path, says("5"), max_turn_length=5)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_the_policy_is_answered_and_goes_on(tmp_path, method):
    seen = []
    trained = trainer(tmp_path, says("Let me see. " + CALL, "5"), method, seen, {"tools": [add]})
    trained.train()
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    first, result, last = seen[0][0]
    assert first == {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    assert (result["role"], result["name"], result["content"]) == ("tool", "add", "5")
    assert last == {"role": "assistant", "content": "5"}
    logged = trained.state.log_history[0]
    assert logged["tools/call_frequency"] == 1 and logged["tools/failure_frequency"] == 0
    assert logged["rollouts/turns"] == 2 and logged["rollouts/failed"] == logged["rollouts/tool_budget"] == 0
    assert 0 < logged["tools/seconds"] < logged["rollouts/seconds"]
    row = trained.completions.rows[0]
    assert (row["turns"], row["calls"], row["failed_calls"]) == (2, 1, 0)
    assert row["completion"] == "assistant: Let me see.\n  → add(a=2, b=3)\n  ← add: 5\nassistant: 5"
    # Sampled are the call, the answer and two ends; "<bos>tool: 5<eos><bos>assistant: " is not.
    assert logged["completions/mean_length"] == len("Let me see. " + CALL) + 1 + 2
    assert logged["completions/clipped_ratio"] == 0


def test_what_goes_wrong_is_said_to_the_policy_and_counted(tmp_path):
    seen = []
    calls = '<tool_call>{"name": "ad", "arguments": {}}</tool_call><tool_call>{broken</tool_call>' + CALL
    trained = trainer(tmp_path, says(calls, "well"), "grpo", seen, {"tools": [add]}, max_completion_length=200)
    trained.train()
    logged = trained.state.log_history[0]
    assert logged["tools/call_frequency"] == 3
    assert logged["tools/failures/unknown_tool"] == logged["tools/failures/malformed"] == pytest.approx(1 / 3)


def test_a_rollout_that_runs_out_of_calls_is_counted(tmp_path):
    limits = {"max_tool_calling_iterations": 1, "max_completion_length": 200}
    trained = trainer(tmp_path, says(CALL), parts={"tools": [add]}, **limits)
    trained.train()
    logged = trained.state.log_history[0]
    assert logged["rollouts/tool_budget"] == 1 and logged["rollouts/turns"] == 2
    row = trained.completions.rows[0]
    assert (row["finish"], row["calls"]) == ("tool_budget", 2)  # the second was not executed


def test_what_failed_stands_in_the_completions_and_has_no_reward(tmp_path):
    async def fails_at_first(row, engine):
        episode = engine.begin()
        await episode.sample()
        if engine.sibling == 0:
            raise KeyError("no such page")
        return episode.done()

    trained = trainer(tmp_path, says("well"), parts={"rollout_func": fails_at_first})
    with pytest.warns(UserWarning, match="2 of 8 rollouts failed"):
        trained.train()
    logged = trained.state.log_history[0]
    assert logged["rollouts/failed"] == 0.25 and "tools/call_frequency" not in logged
    rows = trained.completions.rows
    assert [bool(row["error"]) for row in rows] == [True, False, False, False] * 2
    assert rows[0]["error"].startswith("KeyError: 'no such page'")
    assert all(row["advantage"] == 0 for row in rows if row["error"])


def of(finish, count):
    return [Rollout([1], [], [], None, "", finish, error="no server" if finish is ERROR else None)] * count


def test_the_run_ends_if_rollouts_of_all_processes_failed():
    """One process has few rollouts, which may all fail by chance."""
    working = [[], 0, 4]
    watch = FailureMonitor(lambda mine: [mine, working])
    with pytest.warns(UserWarning, match="2 of 6 rollouts failed"):
        watch.count(of(ERROR, 2))
    lucky = FailureMonitor(lambda mine: [mine, [["no route"], 4, 4]])
    with pytest.warns(UserWarning, match="4 of 6 rollouts failed"):
        lucky.count(of(FinishReason.STOP, 2))
    broken = FailureMonitor(lambda mine: [mine, [["no route"], 4, 4]])
    with pytest.raises(RolloutError, match=r"all 6 rollouts failed\. The first one: no server"):
        broken.count(of(ERROR, 2))


def test_failed_rollouts_in_a_row_are_counted_on_by_a_resume():
    watch, resumed = FailureMonitor(), FailureMonitor()
    watch.count(of(FinishReason.STOP, 2))
    with pytest.warns(UserWarning, match="2 of 2 rollouts failed"):
        watch.count(of(ERROR, 2))
    watch.count(of(ERROR, 2))
    resumed.load_state_dict(watch.state_dict())
    with pytest.raises(RolloutError, match="all 2 rollouts failed, 3 rollout batches in a row"):
        resumed.count(of(ERROR, 2))


@pytest.mark.slow
def test_what_tools_said_is_learned_in_addition(tmp_path):
    """ECHO: with rewards that teach nothing, the policy still learns to predict the results."""
    parts = {"tools": [add], "reward_funcs": lambda completions, **_: [0.0] * len(completions)}
    settings = {"max_steps": 3, "learning_rate": 1e-2, "record": "tokens"}
    plain = trainer(tmp_path / "plain", says(CALL, "5"), parts=parts, **settings)
    echo = trainer(tmp_path / "echo", says(CALL, "5"), parts=parts, supervised_roles={"tool": 1.0}, **settings)
    plain.train()
    echo.train()
    losses = runs.history(echo, "supervised/loss")
    assert losses[-1] < losses[0] and not any("supervised/loss" in log for log in plain.state.log_history)
    first, *_ = read_rows(files(tmp_path / "echo/record")[0])
    observed, sampled = first["observed"], first["sampled"]
    written = [token for token, who in zip(first["token_ids"], observed, strict=True) if who]
    assert "tool: 5" in TOKENIZER.decode(written)
    assert set(observed) == {0, 2} and not any(s and who for s, who in zip(sampled, observed, strict=True))
    weights = first["term/supervised"]
    assert [weight > 0 for weight in weights] == [who > 0 for who in observed]
    assert runs.history(echo, "supervised/tokens")[0] == 8 * len(written)


def test_tokens_that_the_filter_leaves_out_are_not_learned(tmp_path):
    (tmp_path / "own.py").write_text("def none(rollout):\n    return [False] * len(rollout.completion_ids)\n")
    settings = {"supervised_roles": {"tool": 1.0}, "supervised_filter": f"{tmp_path}/own.py:none"}
    trained = trainer(tmp_path, says(CALL, "5"), parts={"tools": [add]}, **settings)
    trained.train()
    assert runs.history(trained, "supervised/tokens") == [0]
