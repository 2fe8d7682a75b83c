"""Callbacks and subclasses of the kinds that public training scripts have, unchanged but for the import."""

import json

import pytest
import torch
from transformers import TrainerCallback

from covey import GRPOTrainer
from tests.support import runs, tiny

# ---- callbacks -------------------------------------------------------------------------------------------------------


class Samples(TrainerCallback):
    """Answers a fixed prompt with the model that a callback is given."""

    def __init__(self):
        self.texts = []

    def on_step_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        was_training = model.training
        model.eval()
        prompt = processing_class("2+2=", return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            ids = model.generate(**prompt, max_new_tokens=3, do_sample=False)
        self.texts.append(processing_class.decode(ids[0, prompt["input_ids"].shape[1] :]))
        model.train(was_training)


class JsonLines(TrainerCallback):
    """Writes the logged rewards into a file of its own."""

    def __init__(self, path):
        self.path = path

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "reward" in (logs or {}):
            with self.path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, "reward": logs["reward"]}) + "\n")


class Average(TrainerCallback):
    """Keeps a moving average of the weights, which the model has at the end."""

    def __init__(self, decay):
        self.decay, self.mean, self.steps = decay, None, []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.mean = [weight.detach().clone() for weight in model.parameters()]

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.steps.append([weight.detach().clone() for weight in model.parameters()])
        for mean, weight in zip(self.mean, model.parameters(), strict=True):
            mean.lerp_(weight.detach(), 1 - self.decay)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        for mean, weight in zip(self.mean, model.parameters(), strict=True):
            weight.data.copy_(mean)


class Target(TrainerCallback):
    """Ends the run, and saves it, once an evaluation reaches a reward."""

    def __init__(self, reward):
        self.reward = reward

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if metrics["eval_reward"] >= self.reward:
            control.should_save = control.should_training_stop = True


@pytest.mark.slow
def test_a_callback_samples_from_the_model_and_changes_nothing(tmp_path):
    plain, samples = runs.trainer(tmp_path / "plain"), Samples()
    sampled = runs.trainer(tmp_path / "sampled", parts={"callbacks": [samples]})
    plain.train(), sampled.train()
    assert len(samples.texts) == 2 and all(samples.texts)
    assert all(torch.equal(a, b) for a, b in zip(runs.weights(plain), runs.weights(sampled), strict=True))


def test_a_callback_writes_what_is_logged(tmp_path):
    path = tmp_path / "rewards.jsonl"
    trained = runs.trainer(tmp_path / "run", parts={"callbacks": [JsonLines(path)]}, max_steps=3)
    trained.train()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["reward"] for line in lines] == runs.history(trained, "reward")
    assert [line["step"] for line in lines] == [1, 2, 3]


def test_a_callback_averages_the_weights(tmp_path):
    average = Average(0.5)
    trained = runs.trainer(tmp_path, parts={"callbacks": [average]})
    begun = runs.weights(trained)
    trained.train()
    first, second = average.steps
    for weight, start, one, two in zip(runs.weights(trained), begun, first, second, strict=True):
        assert torch.allclose(weight, start / 4 + one / 4 + two / 2)  # decay 1/2, two steps


@pytest.mark.slow
@pytest.mark.parametrize(("reward", "steps"), [(0.0, 1), (1000.0, 3)])
def test_a_callback_ends_a_run_that_is_good_enough(tmp_path, reward, steps):
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "save_strategy": "steps"}
    parts = {"callbacks": [Target(reward)], "eval_dataset": tiny.rows(2)}
    trained = runs.trainer(tmp_path, parts=parts, max_steps=3, save_steps=100, **evaluated)
    trained.train()
    assert trained.state.global_step == steps
    assert (tmp_path / "checkpoint-1").is_dir() == (steps == 1)


# ---- subclasses ------------------------------------------------------------------------------------------------------


class LogsMore(GRPOTrainer):
    def log(self, logs, start_time=None):
        if "loss" in logs:
            logs = {**logs, "mine/step": float(self.state.global_step)}
        super().log(logs, start_time)


class SlowHead(GRPOTrainer):
    """Trains the head at another rate than the body."""

    def create_optimizer(self, *args, **kwargs):
        head = list(self.model.get_output_embeddings().parameters())
        rest = [weight for weight in self.model.parameters() if all(weight is not one for one in head)]
        groups = [{"params": rest}, {"params": head, "lr": 0.0}]
        self.optimizer = torch.optim.SGD(groups, lr=self.args.learning_rate)
        return self.optimizer


class Decayed(GRPOTrainer):
    """Adds a penalty on the weights to the loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return loss + 0.5 * sum((weight**2).sum() for weight in model.parameters())


def test_a_subclass_logs_values_of_its_own(tmp_path):
    trained = runs.trainer(tmp_path, kind=LogsMore)
    trained.train()
    assert runs.history(trained, "mine/step") == [1.0, 2.0]
    assert len(runs.history(trained, "reward")) == 2  # the trainer adds its own


def test_a_subclass_makes_its_own_optimizer(tmp_path):
    trained = runs.trainer(tmp_path, kind=SlowHead, parts={"model": tiny.model(tie_word_embeddings=False)})
    before = {name: weight.detach().clone() for name, weight in trained.model.named_parameters()}
    trained.train()
    moved = {name for name, weight in trained.model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved and "lm_head.weight" not in moved


def test_a_subclass_adds_a_term_to_the_loss(tmp_path):
    # Rewards that are all equal have no gradient: what is left is the penalty's, the weights themselves, once for each
    # micro-batch.
    parts = {"reward_funcs": lambda completions, **kwargs: [1.0] * len(completions)}
    trained = runs.trainer(tmp_path, kind=Decayed, parts=parts, optim="sgd", max_steps=1, max_grad_norm=0.0)
    before = runs.weights(trained)
    trained.train()
    micro_batches = runs.history(trained, "micro_batches/count")[0]
    for weight, was in zip(runs.weights(trained), before, strict=True):
        assert torch.allclose(weight, was * (1 - 1e-2 * micro_batches), atol=1e-6)
