"""Public agent libraries, unmodified and in an environment of their own, play and train through the endpoint.

`make test-agents` installs them. Each plays a rollout of a policy that follows a script, and two steps of a tiny model.
"""

import os
import runpy
from pathlib import Path

import pytest

from covey.engines.scripted import ScriptedEngine
from covey.rollout.agents import AgentProgram
from covey.rollout.environments.agent import REWARD, PlayedEnvironment
from covey.rollout.user_functions import RolloutValidator
from tests.support import tiny
from tests.support.playing import TOKENIZER, call, play

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "agents"
PYTHON = os.environ.get("COVEY_AGENTS_PYTHON", str(ROOT / ".venv-agents" / "bin" / "python"))

SHELL = "```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo $((2 + 3))\n```"
ADD = call("add", a=2, b=3)
TURNS = {
    "openai_agents": [ADD, "5"],
    "langgraph_agent": [ADD, "5"],
    "anthropic_agent": [ADD, "5"],
    "mcp_agent": [ADD, "5"],
    "smolagents_agent": [ADD, call("final_answer", answer="5")],
    "mini_swe_agent": ["no block", SHELL],
}
RESULTS = {"smolagents_agent": "Observation:\n5", "mini_swe_agent": "EXACTLY ONE action"}
STRANDS = {"smolagents_agent": 1, "mini_swe_agent": 1}  # these two rewrite their history

pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason="`make test-agents` installs the agents"),
]


@pytest.mark.parametrize("agent", TURNS)
def test_a_public_agent_plays(agent):
    program = AgentProgram([PYTHON, str(FOLDER / "run.py"), agent])
    player = PlayedEnvironment(program, 120.0, RolloutValidator(len(TOKENIZER), None))
    messages = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "What is 2 plus 3?"}]
    turns = iter(TURNS[agent])
    engine = ScriptedEngine(lambda ids, seed: [*TOKENIZER(next(turns))["input_ids"], TOKENIZER.eos_token_id])
    (rollout,) = play(player, engine, rows=[{"prompt": messages, "answer": 5}], room=2000, seconds=120.0)
    player.close()
    assert rollout.error is None, rollout.error
    assert rollout.extras[REWARD] == 1.0 and len(rollout.turn_ends) == 2
    assert len(rollout.strands) == STRANDS.get(agent, 0)
    assert RESULTS.get(agent, "<bos>tool: 5<eos>") in TOKENIZER.decode(rollout.completion_ids)
    sampled = [one for one, by_policy in zip(rollout.completion_ids, rollout.sampled, strict=True) if by_policy]
    assert TOKENIZER.decode(sampled) == "<eos>".join([*TURNS[agent], ""])


@pytest.mark.parametrize("agent", TURNS)
def test_a_policy_is_trained_in_a_public_agent(agent, tmp_path):
    """Two steps whose rewards differ between the rollouts of a group: the gradients are not 0."""

    def characters(completions, **columns):
        return [float(sum(map(ord, text))) for text in map(str, completions)]

    model = tiny.model(scale=3.0, max_position_embeddings=4096)
    model.save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    settings = {"max_steps": 2, "num_generations": 2, "per_device_train_batch_size": 2, "max_completion_length": 400}
    quiet = {"report_to": "none", "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "rollout_timeout": 120}
    train = runpy.run_path(str(FOLDER / "train.py"))["main"]
    paths = {"output_dir": str(tmp_path / "run"), "python": PYTHON}
    trainer = train(str(tmp_path / "model"), agent, reward=characters, **paths, **settings, **quiet)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2 and all(entry["rollouts/failed"] == 0 for entry in logs)
    assert all(entry["grad_norm"] > 0 for entry in logs)
