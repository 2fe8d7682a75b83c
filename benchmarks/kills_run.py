"""A run that `benchmarks.kills` kills: a tiny random model in a chosen mode, which says where it is.

    python benchmarks/kills_run.py FOLDER MODE [PLACE NUMBER SIGNAL]

Started again in the same folder, it continues. With PLACE it sends itself the signal on entering that place for the
NUMBER-th time ("PLACE, half a file" leaves the file that was written last cut in half, as a kill within a write does).
Written into FOLDER, by each process of the run:

    place.RANK        the innermost place that the process is in
    places.RANK.json  how often each place was entered, once training has ended
    trained.RANK.RUN  a line of JSON for each start (the step it resumed from) and for each micro-batch (its step, and a
                      digest of prompt and completion for each of its rollouts; of prompt and seed with a vLLM server)
    sampled.RANK      with a vLLM server: a line of JSON for each completion, which seed it was sampled with
    result.RANK.RUN.json  digests of weights and optimizer, and the logs, once training has ended

RUN is the variant of a study, or "run".
"""

import functools
import json
import mmap
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / part) for part in ("", "tools")]

from golden import configurations as golden  # noqa: E402
from golden import parts  # noqa: E402
from golden.child import digest, rank, weights_digest, without_times  # noqa: E402

SETTINGS: dict[str, Any] = {
    "max_steps": 8,
    "save_strategy": "steps",
    "save_steps": 2,
    "save_total_limit": 2,
    "resume_from_checkpoint": "auto",
}
SENT_AGAIN = "sync/bytes"
"""A logged name that differs after a resume: an engine of its own is sent the weights when it starts."""
CYCLE = golden.OFF_POLICY
TALK = golden.conversation(*golden.TOOL_TURNS, tools=[parts.add, parts.halve])
COUNTER = golden.conversation([parts.call("add", by=2), parts.call("add", by=5), "no"], ["done "])
COUNTER["parts"]["environment_factory"] = parts.Counter
SCRIPTED = golden.Lazy(lambda: parts.Scripted(parts.letters))


def stream() -> Any:
    from datasets import Dataset

    return Dataset.from_list(parts.rows(6)).to_iterable_dataset()


def four_bits() -> Any:
    """A base in 4 bits, as it is read from a folder."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    bits = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
    with tempfile.TemporaryDirectory() as folder:
        parts.language_model(hidden_size=64, tie_word_embeddings=False).save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(**bits))


def served() -> Any:
    """The model of vLLM servers, whose attention wants larger heads."""
    from tests.real_vllm.serving import SHAPE

    return parts.language_model(**SHAPE)


def with_server(**settings: Any) -> dict[str, Any]:
    """Settings of a run that samples from the server at `SERVER`."""
    where = {"vllm_server_base_url": os.environ.get(SERVER, ""), "vllm_group_port": 0, "vllm_server_timeout": 200.0}
    where["generation_kwargs"] = {"min_tokens": 8}  # so that no two seeds sample the same
    return {"parts": {"model": golden.Lazy(served)}, "use_vllm": True, "vllm_mode": "server", **where, **settings}


SERVER = "COVEY_KILLS_SERVER"
"""Environment variable: the address of the vLLM server that a run samples from."""
ZERO3: dict[str, Any] = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
ZERO3 |= dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
HALF = {"per_device_train_batch_size": 2}
WORKERS = "rewards in workers"
STUDY = "study"
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "off-policy": {**CYCLE, "epsilon_high": 0.28, "delta": 4.0},
    "RLOO with KL": {"method": "rloo", **golden.REFERENCE},
    "LoRA with dropout": {"parts": {"peft_config": golden.lora(lora_dropout=0.1)}, **CYCLE},
    "dynamic sampling": golden.DIFFICULT,
    "difficulty sampler": golden.REFILLED,
    "speculative reuse": {"parts": {"reward_funcs": parts.even}, "speculative_reuse": "exact"},
    "stream": {"parts": {"train_dataset": golden.Lazy(stream)}},
    "async rollouts": {"parts": {"engine": SCRIPTED}, "max_staleness": 2, "engine_parity": "off", **CYCLE},
    "tools": {**TALK, "max_tool_calling_iterations": 3},
    "environments": COUNTER,
    "evaluation suites": {"parts": {"eval_dataset": golden.Lazy(golden.suites)}, **golden.EVALUATED},
    "4 bits": {"parts": {"model": golden.Lazy(four_bits), "peft_config": golden.lora()}, **CYCLE},
    "images": {"parts": {"vision": golden.Lazy(parts.gemma3), **golden.IMAGES}, "beta": 0.05},
    WORKERS: {"reward_isolation": "process"},
    "two processes": {**HALF, **golden.CHOSEN},
    "FSDP2": {**HALF, "fsdp": True, "beta": 0.05},
    "ZeRO-3": {**HALF, "deepspeed": ZERO3, "beta": 0.05},
    "command line": {},
    STUDY: {},
    "vLLM server, max_staleness 1": with_server(max_staleness=1),
    "vLLM server, max_staleness 4": with_server(max_staleness=4),
}
"""Trainer arguments (`parts`) and settings of each mode."""
SEVERAL = ("two processes", "FSDP2", "ZeRO-3")
SERVED = tuple(mode for mode in MODES if mode.startswith("vLLM"))


class Places:
    """Where the process is, in a file that outlives it, and the kill that is due."""

    def __init__(self, folder: Path, due: tuple[str, int, int] | None):
        self.folder, self.due = folder, due
        self.entered: Counter[str] = Counter()
        path = folder / f"place.{rank()}"
        path.write_bytes(bytes(64))
        with path.open("r+b") as file:
            self.now = mmap.mmap(file.fileno(), 64)

    def at(self, place: str) -> None:
        self.now[:] = place.encode().ljust(64, b"\0")

    def mark(self, place: str, owner: Any, name: str, when: Callable[..., bool] = lambda *a, **k: True) -> None:
        """Name the time that `owner.name` takes, if `when` says so of its arguments."""
        function = getattr(owner, name)
        if getattr(function, "place", None) == place:  # by another variant of a study
            return

        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if not when(*args, **kwargs):
                return function(*args, **kwargs)
            before = bytes(self.now[:])
            self.enter(place)
            try:
                result = function(*args, **kwargs)
                self.enter(f"{place}, half a file")
                return result
            finally:
                self.now[:] = before

        marked.place = place  # type: ignore[attr-defined]
        setattr(owner, name, marked)

    def enter(self, place: str) -> None:
        half = place.endswith("half a file")
        written = [path for path in (self.folder / "run" / ".saving").rglob("*") if path.is_file()] if half else []
        if half and not written:
            return
        self.at(place)
        self.entered[place] += 1
        if self.due is None or self.due[:2] != (place, self.entered[place]):
            return
        if half and self.due[2] == signal.SIGKILL:  # other signals let the file be written
            last = max(written, key=lambda path: path.stat().st_mtime_ns)
            os.truncate(last, last.stat().st_size // 2)
        os.kill(os.getpid(), self.due[2])


def watch(trainer: Any, places: Places) -> None:
    """Name the stages of a step, of an evaluation and of writing and reading a checkpoint."""
    import torch
    from transformers import TrainerState

    from covey.trainer import checkpoint

    places.mark("sampling", trainer.collector, "collect")
    places.mark("rewards", type(trainer.rollouts.rewards), "__call__")
    places.mark("scoring", trainer.behaviour, "score")
    places.mark("credit", trainer.credit, "assign")
    places.mark("forward", trainer.updates, "loss")
    places.mark("backward", trainer.accelerator, "backward")
    places.mark("optimizer", torch.optim.AdamW, "step")
    places.mark("logging", trainer, "log")
    places.mark("completions on record", trainer.completions, "write")
    places.mark("report", trainer.report, "on_save")
    places.mark("evaluation", trainer.evaluation, "run")
    places.mark("checkpoint: weights", trainer, "save_model")
    places.mark("checkpoint: optimizer", trainer, "_save_optimizer_and_scheduler")
    places.mark("checkpoint: random states", trainer, "_save_rng_state")
    places.mark("checkpoint: method state", trainer.checkpoints, "method_state")
    places.mark("checkpoint: trainer state", TrainerState, "save_to_json")
    places.mark("checkpoint: manifest", checkpoint, "seal")
    places.mark("checkpoint: flushed after its rename", checkpoint, "flush")
    places.mark("rotation", checkpoint, "superfluous_checkpoints")
    places.mark("deletion", shutil, "rmtree", when=lambda path, **how: ".saving" in str(path))
    places.mark("resuming: search", trainer.checkpoints, "find")
    places.mark("resuming: weights", trainer, "_load_from_checkpoint")
    places.mark("resuming: method state", trainer.checkpoints, "load")


def record(trainer: Any, path: Path, seeds: dict[str, int] | None) -> None:
    """Write down which rollouts are trained on (by their seeds, if given), and where a start resumes."""
    loss, begin = trainer.updates.loss, trainer.callback_handler.on_train_begin

    def write(**line: Any) -> None:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def noting(model: Any, batch: Any, plan: Any, number: int = 0) -> Any:
        if plan.training:
            prompts, completions = batch.prompts(), batch.completions()
            rows = [prompts[group].tolist() for group in batch.groups.tolist()]
            pairs = [digest([prompt, ids.tolist()])[:16] for prompt, ids in zip(rows, completions, strict=True)]
            pairs = pairs if seeds is None else [f"seed {seeds[pair]}" for pair in pairs]
            write(step=trainer.state.global_step, pairs=pairs)
        return loss(model, batch, plan, number)

    def beginning(args: Any, state: Any, control: Any) -> Any:
        write(resumed=state.global_step)
        return begin(args, state, control)

    trainer.updates.loss, trainer.callback_handler.on_train_begin = noting, beginning


def sampled_with(trainer: Any, path: Path) -> dict[str, int]:
    """Seeds by digests of prompt and completion, with earlier starts: a seed is (rollout batch, prompt, sample)."""
    lines = path.read_text().splitlines() if path.exists() else []
    seeds = dict(json.loads(line) for line in lines if line.endswith("]"))
    engine = trainer.collector.engine
    generate = engine.generate

    async def noting(request: Any) -> Any:
        completions = await generate(request)
        with path.open("a") as file:
            for seed, completion in zip(request.seeds, completions, strict=True):
                pair = digest([list(request.prompt_ids), list(completion.token_ids)])[:16]
                seeds[pair] = seed
                file.write(f"\n{json.dumps([pair, seed])}")
        return completions

    engine.generate = noting
    return seeds


def local(value: Any) -> Any:
    """What this process holds of a tensor."""
    value = getattr(value, "_local_tensor", value)
    return value.detach() if hasattr(value, "detach") else value


def digests(trainer: Any) -> dict[str, str]:
    """Of weights, whole ones where DeepSpeed has spread them, and of what this process has of the optimizer."""
    from torch.utils._pytree import tree_map

    from covey.policy.weights import weight_update

    if trainer.is_deepspeed_enabled:
        weights = digest(
            parts.plain({spec.name: tensor for spec, tensor in weight_update(trainer.policy, 0).checked()})
        )
    else:
        weights = weights_digest(trainer.model)
    return {"weights": weights, "optimizer": digest(parts.plain(tree_map(local, trainer.optimizer.state_dict())))}


def main(folder: Path, mode: str, due: tuple[str, int, int] | None) -> None:
    import torch
    from tests.support import launching

    from covey.rewards import resolve_reward
    from covey.trainer.trainer import OnlineTrainer

    torch.set_num_threads(1)
    places = Places(folder, due)
    places.at("start")
    train = OnlineTrainer.train

    def trained(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch(self, places)
        run = f"{rank()}.{Path(self.args.output_dir).name}"
        seeds = sampled_with(self, folder / f"sampled.{rank()}") if mode in SERVED else None
        record(self, folder / f"trained.{run}", seeds)
        places.at("between")
        (folder / f"begun.{rank()}").touch()
        result = train(self, *args, **kwargs)
        places.at("end")
        logs = [without_times(entry) for entry in self.state.log_history if "train_runtime" not in entry]
        logs = [{name: value for name, value in entry.items() if name != SENT_AGAIN} for entry in logs]
        (folder / f"result.{run}.json").write_text(json.dumps({**digests(self), "logs": logs}))
        (folder / f"places.{rank()}.json").write_text(json.dumps(places.entered))
        return result

    OnlineTrainer.train = trained  # type: ignore[method-assign]
    if mode == "command line":
        from covey.cli.main import main as covey

        status = covey(["grpo", "--config", str(folder / "run.yaml"), "--resume", "auto"])
    elif mode == STUDY:
        study(folder / "run", places).train(resume=True)
        status = 0
    else:
        settings = {**SETTINGS, **MODES[mode]}
        if mode == WORKERS:
            settings["parts"] = {"reward_funcs": resolve_reward(f"{folder}/reward.py:longer")}
        if mode == "ZeRO-3":
            launching.in_a_child()
        golden.trainer(folder / "run", **settings).train()
        status = 0
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(status)  # threads of engines end with the process


def study(folder: Path, places: Places) -> Any:
    """A study of two variants, one of which is cloned and then stopped."""
    from covey_tools.study import commands
    from covey_tools.study import study as module
    from covey_tools.study.study import Study

    def interventions(study: Study) -> list[str]:
        if study.round == 4:
            study.clone("b", "clone", learning_rate=3e-2)
        return ["b"] if study.variants["b"].step == 5 else []

    adapter = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    variants = {"a": {}, "b": {"learning_rate": 3e-2, "peft": {"r": 2}}}
    settings = {name: value for name, value in golden.SETTINGS.items() if name not in ("save_strategy", "disable_tqdm")}
    made = Study(
        parts.language_model(),
        variants,
        {**settings, "max_steps": 8, "peft": adapter, "output_dir": str(folder)},
        reward_funcs=parts.longer,
        train_dataset=parts.rows(),
        eval_dataset=parts.rows(2),
        processing_class=parts.tokenizer(),
        eval_steps=4,
        save_rounds=2,
        halving=interventions,
    )
    places.mark("sampling", made, "_sample")
    places.mark("study: commands", module, "carry_out")
    places.mark("study: state", commands, "write_json")
    return made


def prepare(folder: Path, server: bool = False) -> None:
    """Model, data, reward and run file of the mode "command line"; others use the reward, servers the model."""
    (served() if server else parts.language_model()).save_pretrained(folder / "model")
    parts.tokenizer().save_pretrained(folder / "model")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in parts.rows()))
    reward = "import time\n\n\ndef longer(completion_ids, **kwargs):\n    time.sleep(0.05)\n"
    reward += "    return [len(ids) for ids in completion_ids]\n"
    (folder / "reward.py").write_text(reward)
    settings = {**golden.SETTINGS, **SETTINGS, "output_dir": str(folder / "run")}
    del settings["resume_from_checkpoint"]
    names = {"model": "model", "dataset": "data.jsonl", "reward_funcs": "reward.py:longer"}
    run = {key: f"{folder}/{name}" for key, name in names.items()}
    (folder / "run.yaml").write_text(json.dumps({**run, **settings}))  # JSON is YAML


if __name__ == "__main__":
    _, where, mode_name, *kill = sys.argv
    chosen = (kill[0], int(kill[1]), int(signal.Signals[kill[2]])) if kill else None
    main(Path(where), mode_name, chosen)
