"""Training in environments: what the trainer makes of `environment_factory`, from arguments to metrics."""

import asyncio
import gc
from typing import ClassVar

import pytest

from covey.core.findings import CheckError
from covey.engines.scripted import ScriptedEngine
from covey.rollout.environments import EnvironmentWarning
from covey.rollout.user_functions import RolloutError
from covey.trainer.rollout_reports import RolloutWarning
from tests.support import runs, tiny
from tests.trainer.agents.test_tools import TOKENIZER, tokenizer

CALL = '<tool_call>{"name": "add", "arguments": {"by": 2}}</tool_call>'


class Counter:
    """An environment whose method is a tool; its reward is what it counted, and a little for its number."""

    made = closed = 0

    def __init__(self):
        Counter.made += 1
        self.number = Counter.made
        self.resets = 0

    def reset(self, answer, **row):
        self.resets += 1
        self.value = 0
        return f" [{answer}]"

    def add(self, by: int) -> str:
        """Add.

        Args:
            by: how much.
        """
        self.value += by
        return str(self.value)

    def get_reward(self):
        return self.value + self.number % 2 / 10

    def close(self):
        Counter.closed += 1


class Talk:
    """A text environment: a point for each digit that is said, over after two turns."""

    def reset(self):
        self.turns = 0
        return "Say digits."

    def step(self, text):
        self.turns += 1
        return "more", float(sum(character.isdigit() for character in text)), self.turns == 2, {}


@pytest.fixture(autouse=True)
def _count_anew():
    Counter.made = Counter.closed = 0


def says(*turns):
    """A policy that says these texts turn after turn, and then the last one again."""

    def script(prompt_ids, seed):
        said = TOKENIZER.decode(prompt_ids).count("<bos>assistant: ") - 1
        return [*TOKENIZER(turns[min(said, len(turns) - 1)])["input_ids"], TOKENIZER.eos_token_id]

    return ScriptedEngine(script)


def trainer(folder, factory=Counter, engine=None, method="grpo", rows=None, parts=None, **changes):
    arguments = {
        "processing_class": tokenizer(),
        "reward_funcs": None,
        "train_dataset": tiny.rows(conversational=True) if rows is None else rows,
        "engine": engine,
        "environment_factory": factory,
        **(parts or {}),
    }
    settings = {"max_completion_length": 150, "max_steps": 2, "engine_parity": "off", **changes}
    return runs.trainer(folder, method, parts=arguments, **settings)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_an_environment_is_played_and_rewards(tmp_path, method):
    trained = trainer(tmp_path, engine=says(CALL, "done"), method=method)
    trained.train()
    assert trained.rewards.names == ["Counter"]
    logged = trained.state.log_history[0]
    assert logged["rewards/Counter/mean"] == pytest.approx(2.05)  # every second one says 2.1
    assert logged["tools/call_frequency"] == 1 and logged["rollouts/turns"] == 2 and logged["rollouts/failed"] == 0


def test_environments_are_used_again_and_closed_at_the_end(tmp_path):
    trainer(tmp_path, engine=says(CALL, "done")).train()
    # 8 completions in each of two rollout batches; the first environment, made to be looked at, is one of them.
    assert (Counter.made, Counter.closed) == (8, 8)


def test_reward_functions_get_the_objects_and_what_was_asked(tmp_path):
    seen = []

    def reward(environments, completions, prompts, answer, **kwargs):
        seen.append((environments, completions, prompts, answer))
        return [float(one.value) + one.number for one in environments]

    trained = trainer(tmp_path, engine=says(CALL, "done"), parts={"reward_funcs": reward}, max_steps=1)
    trained.train()
    assert trained.rewards.names == ["reward", "Counter"]
    environments, completions, prompts, answers = seen[0]
    assert all(one.value == 2 for one in environments) and len({id(one) for one in environments}) == len(completions)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert prompt[0]["content"].endswith(f"= [{answer}]")


def test_the_environments_reward_has_a_weight(tmp_path):
    def zero(completions, **kwargs):
        return [0.0] * len(completions)

    weights = [
        trainer(tmp_path, parts={"reward_funcs": zero}, reward_weights=given).rewards.weights.tolist()
        for given in (None, [0.5], [0.5, 2.0])
    ]
    assert weights == [[1.0, 1.0], [0.5, 1.0], [0.5, 2.0]]


def test_without_get_reward_a_reward_function_is_needed(tmp_path):
    class Silent(Counter):
        get_reward = None

    with pytest.raises(ValueError, match=r"`reward_funcs` is missing.*Environments with `get_reward` need none"):
        trainer(tmp_path, Silent)


def test_rewards_of_turns(tmp_path):
    class Turns(Talk):
        turn_rewards = True

        def step(self, text):
            observation, reward, done, info = super().step(text)
            return observation, None if text == "x" else reward, done, info

    def script(prompt_ids, seed):
        second = TOKENIZER.decode(prompt_ids).count("<bos>assistant: ") == 2
        text = "x" if second and seed % 3 == 0 else str(seed)[: 1 + seed % 4]
        return [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]

    rows = [{"seed": i} for i in range(8)]
    trained = trainer(tmp_path, Turns, ScriptedEngine(script), rows=rows, max_steps=1, step_baseline="turn")
    rollouts = trained.rollouts.next(next(iter(trained.get_train_dataloader())), "train")
    batch = trained.gather_experience(rollouts, "train", None).batch
    ends = batch.sampled & (batch.token_ids == TOKENIZER.eos_token_id)
    per_turn = batch.advantages[ends].view(-1, 2)
    assert (per_turn[:, 0] != per_turn[:, 1]).any()  # each turn has an advantage of its own
    assert trained.rewards.names == ["Turns"]


@pytest.mark.parametrize("kind", ["list", "dataset", "stream"])
def test_text_environments_need_no_prompts(tmp_path, kind):
    import datasets

    rows = [{"seed": i} for i in range(8)]
    if kind != "list":
        rows = datasets.Dataset.from_list(rows)
        rows = rows.to_iterable_dataset() if kind == "stream" else rows
    trained = trainer(tmp_path, Talk, says("12", "3"), rows=rows, export_completions=True)
    trained.train()
    logged = trained.state.log_history[0]
    assert logged["rewards/Talk/mean"] == 3 and logged["rollouts/turns"] == 2
    assert {row["prompt"] for row in trained.completions.rows} == {"user: Say digits."}


@pytest.mark.slow
def test_a_tiny_model_learns_in_a_text_environment(tmp_path):
    rows = [{"seed": i} for i in range(16)]
    settings = {"max_completion_length": 60, "max_steps": 10, "num_generations": 8, "learning_rate": 1e-2}
    trained = trainer(tmp_path, Talk, rows=rows, parts={"model": tiny.model(scale=3.0)}, **settings)
    trained.train()
    rewards = runs.history(trained, "rewards/Talk/mean")
    assert sum(rewards[-3:]) > 2 * sum(rewards[:3])  # 4 at first


def test_rewards_of_failed_rollouts_are_left_out(tmp_path):
    class Fragile(Counter):
        def get_reward(self):
            if self.number % 2:
                raise OSError("lost")
            return 1.0

    with pytest.warns(RolloutWarning, match=r"rollouts failed.*Fragile.get_reward raised OSError: lost"):
        trained = trainer(tmp_path, Fragile, says("done"), max_steps=1)
        trained.train()
    logged = trained.state.log_history[0]
    assert logged["rollouts/failed"] == 0.5 and logged["rewards/Fragile/mean"] == 1.0
    assert Counter.made == Counter.closed


def test_a_run_in_which_every_rollout_fails_ends(tmp_path):
    class Broken(Counter):
        def reset(self, **row):
            raise OSError("no server")

    with pytest.raises(RolloutError, match=r"all 8 rollouts failed.*Broken.reset raised OSError: no server"):
        trainer(tmp_path, Broken, says("done")).train()
    assert Counter.made == Counter.closed > 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_environments_are_closed_when_training_ends_early(tmp_path, error):
    def reward(completions, **kwargs):
        raise error("enough")

    with pytest.raises(error if error is KeyboardInterrupt else Exception):
        trainer(tmp_path, engine=says("done"), parts={"reward_funcs": reward}).train()
    assert Counter.made == Counter.closed == 8


def test_a_trainer_that_never_trains_closes_what_it_looked_at(tmp_path):
    made = trainer(tmp_path)
    del made
    gc.collect()
    assert Counter.made == Counter.closed == 1


def test_an_evaluation_closes_its_environments(tmp_path):
    parts = {"eval_dataset": tiny.rows(4, conversational=True)}
    trained = trainer(tmp_path, engine=says(CALL, "done"), parts=parts, per_device_eval_batch_size=8)
    assert trained.evaluate()["eval_rewards/Counter/mean"] == pytest.approx(2.05)
    assert Counter.made == Counter.closed == 8


def test_an_environment_that_fails_to_close_ends_no_run(tmp_path):
    class Clings(Counter):
        def close(self):
            raise OSError("still there")

    with pytest.warns(EnvironmentWarning, match=r"Clings.close raised OSError: still there"):
        trainer(tmp_path, Clings, says("done"), max_steps=1).train()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_sampling_ahead_keeps_environments_until_they_are_scored(tmp_path, stream):
    values = []

    def reward(environments, **kwargs):
        values.extend(one.value for one in environments)
        return [0.0] * len(environments)

    parts = {"reward_funcs": reward}
    settings = {"max_staleness": 1, "max_steps": 3, "stream_rewards": stream, "save_strategy": "steps", "save_steps": 1}
    trained = trainer(tmp_path, engine=says(CALL, "done"), parts=parts, **settings)
    trained.train()
    assert values == [2] * 24 and Counter.made == Counter.closed == 16
    resumed = trainer(tmp_path, engine=says(CALL, "done"), parts=parts, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert values == [2] * 32


def test_few_environments_are_enough_for_a_rollout_batch(tmp_path):
    class Scarce:
        max_environments = 2
        max_turns = 1
        made = 0

        def __call__(self):
            Scarce.made += 1
            return Talk()

    trained = trainer(tmp_path, Scarce(), says("12"), rows=[{"seed": i} for i in range(8)])
    trained.train()
    assert Scarce.made == 2
    logged = trained.state.log_history[0]
    assert logged["rewards/Talk/mean"] == 2 and logged["rollouts/turns"] == 1
    assert logged["completions/clipped_ratio"] == 1  # the environment wanted to continue


@pytest.mark.slow
def test_waiting_for_an_environment_is_not_the_rollouts_own_time(tmp_path):
    class Slow(Talk):
        async def step(self, text):
            await asyncio.sleep(0.5)
            return Talk.step(self, text)

    class Scarce:
        max_environments = 1
        max_turns = 1

        def __call__(self):
            return Slow()

    trained = trainer(tmp_path, Scarce(), says("12"), rows=[{"seed": i} for i in range(8)], rollout_timeout=3.6)
    trained.train()  # the last of 8 is over after 4 seconds, of which half a second is its own
    assert trained.state.log_history[0]["rollouts/failed"] == 0


def test_a_tool_may_be_called_play(tmp_path):
    class Game(Counter):
        async def play(self, move: str) -> str:
            """Play.

            Args:
                move: what to play.
            """
            return move

    trained = trainer(tmp_path, Game)
    assert list(trained.collector.spec.play.agent.toolbox.tools) == ["play", "add"]


class Plays:
    """Plays rollouts itself, as the adapter of verifiers does."""

    closed = 0

    async def play(self, row, engine):
        episode = engine.begin()
        reply = await episode.sample()
        extras = {"environment_reward": len(reply.text), "environment_scores": {"words": 2.0}}
        return episode.done(**extras)

    def close(self):
        self.closed += 1


def test_environments_that_play_rollouts_themselves(tmp_path):
    plays = Plays()
    trained = trainer(tmp_path, plays, says("done"))
    trained.train()
    logged = trained.state.log_history[0]
    assert logged["rewards/environment/mean"] == 4 and logged["environment/words"] == 2.0
    assert plays.closed == 1


class Riddle:
    """An environment of one answer: `reset` asks, `get_reward` judges what the object was told."""

    asked: ClassVar = []

    def reset(self, seed):
        Riddle.asked.append(seed)
        return f"What is {seed}?"

    def get_reward(self):
        return 5.0


NAMED = [
    {"prompt": [{"role": "user", "content": "Count."}], "answer": "2", "environment": "counter"},
    {"prompt": None, "answer": None, "environment": "talk"},
]


def test_rows_name_their_environment_and_see_its_tools_alone(tmp_path):
    prompts = []

    def script(prompt_ids, seed):
        prompts.append(TOKENIZER.decode(prompt_ids))
        return says(CALL, "done").script(prompt_ids, seed)

    engine, factory = ScriptedEngine(script), {"counter": Counter, "talk": Talk}
    trained = trainer(tmp_path, factory, engine, rows=NAMED * 2, max_steps=1, shuffle_dataset=False)
    trained.train()
    shown = {("Count." in prompt, "tool: add" in prompt) for prompt in prompts if "assistant: " in prompt}
    assert shown == {(True, True), (False, False)}
    logged = trained.state.log_history[0]
    assert logged["rollouts/failed"] == 0
    assert logged["environment/counter/reward"] == pytest.approx(2.05)  # every second one says 2.1
    assert logged["environment/talk/reward"] == 1  # the digit of the call, in the first of two turns
    assert trained.rewards.names == ["Counter", "Talk"]
    for name in ("Counter", "Talk"):
        assert logged[f"rewards/{name}/mean"] == pytest.approx(logged[f"environment/{name.lower()}/reward"])


@pytest.mark.parametrize("name", ["shop", None])
def test_an_unknown_environment_is_named_with_its_row(tmp_path, name):
    rows = [NAMED[0], NAMED[0] | {"environment": name}]
    with pytest.raises(CheckError, match=rf"row 1 .*{name!r}.* 'counter', 'talk'") as raised:
        trainer(tmp_path, {"counter": Counter, "talk": Talk}, rows=rows)
    assert raised.value.codes == ["environment-name"]


def test_environments_need_no_data(tmp_path):
    Riddle.asked.clear()
    factory = {"riddle": Riddle, "talk": Talk}
    trained = trainer(tmp_path, factory, says("done"), parts={"train_dataset": None}, shuffle_dataset=False)
    trained.train()
    logged = trained.state.log_history[0]
    assert logged["environment/riddle/reward"] == 5 and logged["rollouts/failed"] == 0
    # Two rollout batches of two prompts with four rollouts each, of which every second is a riddle.
    assert sorted(Riddle.asked) == [0] * 4 + [1] * 4


def test_without_data_steps_have_to_be_given(tmp_path):
    with pytest.raises(CheckError, match="`max_steps`") as raised:
        trainer(tmp_path, Riddle, parts={"train_dataset": None}, max_steps=-1)
    assert raised.value.codes == ["dataset-missing"]


def test_environments_of_one_class_share_a_reward_and_others_have_their_own(tmp_path):
    """Rewards of a rollout are None but for its own class's, as TRL has it; a name that is there gets a number."""

    class Other(Riddle):
        def get_reward(self):
            return 7.0

    other = type("Riddle", (Other,), {})
    factory = {"one": Riddle, "two": Riddle, "three": other}
    rows = [{"prompt": None, "seed": 1, "environment": name} for name in factory] + [
        {"prompt": None, "seed": 1, "environment": "one"}
    ]
    trained = trainer(tmp_path, factory, says("done"), rows=rows, max_steps=1, per_device_train_batch_size=8)
    assert trained.rewards.names == ["Riddle", "Riddle_1"] and trained.rewards.weights.tolist() == [1.0, 1.0]
    trained.train()
    logged = trained.state.log_history[0]
    assert (logged["rewards/Riddle/mean"], logged["rewards/Riddle_1/mean"]) == (5, 7)


def test_an_environment_whose_reset_returns_nothing_needs_no_prompt(tmp_path):
    class Mute(Riddle):
        def reset(self, seed):
            pass

    rows = [{"seed": i} for i in range(8)]
    trained = trainer(tmp_path, Mute, says("done"), rows=rows, max_steps=1, export_completions=True)
    trained.train()
    assert trained.state.log_history[0]["rollouts/failed"] == 0
    assert {row["prompt"] for row in trained.completions.rows} == {"user:"}


def test_an_environment_may_have_reset_alone(tmp_path):
    trained = trainer(tmp_path, Riddle, says("done"), parts={"train_dataset": None}, max_steps=1)
    trained.train()
    logged = trained.state.log_history[0]
    assert (logged["rollouts/turns"], logged["rewards/Riddle/mean"]) == (1, 5)
