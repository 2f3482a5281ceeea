"""What a request must be; a front checks the same before it sends one."""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from fastlayers_server.engine.config import SchedulerConfig
from fastlayers_server.engine.protocol import Submit
from fastlayers_server.engine.queue import WaitingQueue


def refusal(
    submit: Submit, config: SchedulerConfig, live: Container[int], draining: bool, queue: WaitingQueue, free: int = 0
) -> tuple[str, str] | None:
    """Return (code, sentence) for a request that must not enter; the front checks the same before.

    ``free``: slots that the next ticks give to so many of those who wait.
    """
    if submit.rid in live:
        return "duplicate_request_id", f"request {submit.rid} is still running"
    if draining:
        return "draining", "the server is shutting down"
    wrong = check_submit(submit, config)
    if wrong:
        return "invalid_prompt", wrong
    prompt = len(submit.prompt) // 4
    if prompt + submit.max_new_tokens > config.max_model_len:
        given = f"{prompt} prompt tokens and {submit.max_new_tokens} new ones"
        return "context_length_exceeded", f"{given} do not fit the context of {config.max_model_len} tokens"
    if prompt > config.max_queued_tokens:  # another try would be refused as well
        accepted = f"at most {config.max_queued_tokens} (--max-queued-tokens)"
        return "context_length_exceeded", f"{prompt} prompt tokens are more than may wait at all; accepted: {accepted}"
    if queue.count >= config.max_queued_requests + free or queue.tokens + prompt > config.max_queued_tokens:
        beside = f" beside one for each of {free} free slots" if free else ""
        requests = f"{config.max_queued_requests} (--max-queued-requests){beside}"
        most = f"{requests} of {config.max_queued_tokens} (--max-queued-tokens)"
        return "queue_full", f"{queue.count} requests of {queue.tokens} tokens wait already; accepted: at most {most}"
    return None


def check_submit(submit: Submit, config: SchedulerConfig) -> str:
    """Return what is wrong with a request, or nothing; the context's length is another matter."""
    if len(submit.prompt) % 4 or not submit.prompt:
        return "the prompt is empty, or not a whole number of ids"
    ids = np.frombuffer(submit.prompt, np.intc)
    vocab = config.vocab_size
    edges = int(ids.min()), int(ids.max())  # of a long prompt by a loop of Python's they take milliseconds
    biased = [token for token, _ in submit.sampling.logit_bias]
    for name, given in (("prompt", edges), ("stop_ids", submit.stop_ids), ("logit_bias", biased)):
        if given and not (min(given) >= 0 and max(given) < vocab):
            wrong = min(given) if min(given) < 0 else max(given)
            return f"{name}: token id {wrong} is not in [0, {vocab})"
    s, features = submit.sampling, config.features
    penalties = (s.frequency_penalty, s.presence_penalty, s.repetition_penalty)
    checks = (
        (submit.max_new_tokens < 1, "max_new_tokens", submit.max_new_tokens, "1 or more"),
        (not 0 <= submit.min_new_tokens <= submit.max_new_tokens, "min_new_tokens", submit.min_new_tokens, "0 to max"),
        (not 0.0 <= s.temperature <= 1e4, "temperature", s.temperature, "0 or more"),
        (not 0.0 < s.top_p <= 1.0, "top_p", s.top_p, "more than 0 and up to 1"),
        (not 0.0 <= s.min_p <= 1.0, "min_p", s.min_p, "0 to 1"),
        (not -1 <= s.top_k < 2**31, "top_k", s.top_k, "a positive integer, or 0 or -1 for off"),
        (not -(2**63) <= s.seed < 2**63, "seed", s.seed, "a 64-bit integer"),
        (not abs(s.frequency_penalty) <= 1e4, "frequency_penalty", s.frequency_penalty, "a number"),
        (not abs(s.presence_penalty) <= 1e4, "presence_penalty", s.presence_penalty, "a number"),
        (not 0.0 < s.repetition_penalty <= 1e4, "repetition_penalty", s.repetition_penalty, "more than 0"),
        (not all(abs(value) <= 1e4 for _, value in s.logit_bias), "logit_bias", "a value", "numbers"),
        (not -1 <= submit.logprobs <= config.max_logprobs, "logprobs", submit.logprobs, f"0 to {config.max_logprobs}"),
        (not -1 <= submit.prompt_logprobs <= config.max_logprobs, "prompt_logprobs", submit.prompt_logprobs,
         f"0 to {config.max_logprobs}"),
        (penalties != (0.0, 0.0, 1.0) and "penalties" not in features, "penalties", penalties, "none on this engine"),
        (bool(s.logit_bias) and "logit_bias" not in features, "logit_bias", "given", "none on this engine"),
        (submit.logprobs >= 0 and "logprobs" not in features, "logprobs", submit.logprobs, "none on this engine"),
        (submit.prompt_logprobs >= 0 and "prompt_logprobs" not in features, "prompt_logprobs", submit.prompt_logprobs,
         "none on this engine"),
        (bool(submit.grammar) and "grammar" not in features, "grammar", "given", "none on this engine"),
        (bool(submit.grammar) and (submit.ignore_eos or submit.min_new_tokens > 0), "grammar", "given",
         "not together with ignore_eos or min_new_tokens"),
    )  # fmt: skip
    return next((f"{name} is {given}; accepted: {accepted}" for bad, name, given, accepted in checks if bad), "")
