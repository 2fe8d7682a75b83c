"""Teachers that are vLLM or SGLang servers: the requests of a batch of rollouts, and scores from the answers."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from covey.config.base import OnlineConfig
from covey.core.batch import TrainBatch
from covey.core.strands import unfolded
from covey.engines.servers.http_client import ServerClient
from covey.engines.servers.protocols import ScoredToken, ScoreRequest
from covey.engines.servers.scoring import ProbeTokens, ServerScorer
from covey.engines.servers.sglang import launch
from covey.policy.lm_head.scores import TokenScores
from covey.policy.sharded_tensors import full_shape

SPREAD = 256  # ids of the vocabulary whose texts are compared with the server's
SPECIAL = 256  # most special tokens that are compared as well


def build_server_scorer(args: OnlineConfig, source: str, model: Any, tokenizer: Any, top: int) -> ServerScorer:
    """The servers of a teacher, which are examined here so that a wrong one fails early.

    Raises:
        CheckError: a server has another vocabulary, names too few tokens, or scores at another temperature.
        NoServerLeft: a server is not up in time.
    """
    named = os.environ.get("VLLM_API_KEY") or os.environ.get(launch.KEY) or None
    key = args.teacher_server_api_key or named
    return ServerScorer(
        [ServerClient(url, key) for url in source.split(",")],
        probe_tokens(tokenizer, full_shape(model.get_output_embeddings().weight)[0]),
        name=source,
        temperature=args.temperature,
        top=top,
        timeout=args.teacher_server_timeout,
        request_timeout=args.teacher_server_request_timeout,
        concurrency=args.teacher_server_concurrency,
    )


def probe_tokens(tokenizer: Any, rows: int) -> ProbeTokens:
    """Tokens of the policy's tokenizer that a server's is compared by, for a policy with logits for `rows` tokens."""
    known = sorted(set(tokenizer.get_vocab().values()))
    spread = {known[number * (len(known) - 1) // (SPREAD - 1)] for number in range(SPREAD)}
    special = sorted(tokenizer.get_added_vocab().values())[-SPECIAL:]
    ids = sorted(spread | {*special} | {known[-1]})
    return ProbeTokens(ids, [tokenizer.decode([token]) for token in ids], known[-1], rows)


def requests_of(batch: TrainBatch, top: int, temperature: float) -> list[ScoreRequest]:
    """One request for each rollout with sampled tokens, or for each strand of it, up to its last sampled token."""
    return [request for request, _ in _requests(batch, top, temperature)]


def scores_of(batch: TrainBatch, answers: Sequence[Sequence[ScoredToken]], top: int) -> TokenScores:
    """Scores of a batch from the answers to its `requests_of`; log-probs are NaN where no token was sampled."""
    places = [place for _, place in _requests(batch, top, 1.0)]
    found = [scored[place] for scored, own in zip(answers, places, strict=True) for place in own]
    device, sampled = batch.token_ids.device, batch.sampled
    logprobs = torch.full((batch.num_tokens,), torch.nan, device=device)
    logprobs[sampled] = torch.tensor([one.logprob for one in found], device=device)
    if not top:
        return TokenScores(logprobs)
    ids = torch.full((batch.num_tokens, top), -1, device=device)
    tops = torch.full((batch.num_tokens, top), -torch.inf, device=device)
    padded = [[*one.top, *[(-1, -torch.inf)] * (top - len(one.top))] for one in found]
    tokens = torch.tensor([[token for token, _ in one] for one in padded], dtype=torch.long, device=device)
    ids[sampled] = tokens.view(-1, top)
    tops[sampled] = torch.tensor([[value for _, value in one] for one in padded], device=device).view(-1, top)
    return TokenScores(logprobs, top_ids=ids, top_logprobs=tops)


def _requests(batch: TrainBatch, top: int, temperature: float) -> Iterator[tuple[ScoreRequest, list[int]]]:
    """Requests, each with the places of the sampled tokens in its answer; together in the order of the batch."""
    rows = batch if batch.jumps is None else unfolded(batch)[0]
    prompts = [prompt.tolist() for prompt in rows.prompts()]
    masks = rows.sampled.split(rows.lengths.tolist())
    for group, completion, mask in zip(rows.groups.tolist(), rows.completions(), masks, strict=True):
        places = mask.nonzero()[:, 0].tolist()
        if places:
            prompt = prompts[group]
            assert prompt, "a prompt has tokens"
            ids = [*prompt, *completion[: places[-1] + 1].tolist()]
            request = ScoreRequest(ids, len(prompt) + places[0], top, temperature)
            yield request, [place - places[0] for place in places]
