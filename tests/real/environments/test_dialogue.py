"""Token ids in, token ids out through three turns with a tool, on a real engine.

The policy is made by hand: a model whose next token depends on the last one alone, so that it always writes
`<tool>ans+2</tool>`. Everything else is what a run has: engine, calculator process, conversation, record."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from real.engines.client import EngineClient
from real.environments.calculator import Calculator
from real.models.tokenizer import CharTokenizer
from real.store import Conversation
from tests.support.tito import drift, next_prompt

Run = Callable[[Coroutine[Any, Any, Any]], Any]
VERSION = "5"


@pytest.fixture
def caller(tiny_model: Path, client: EngineClient, run: Run, tmp_path: Path) -> Iterator[None]:
    """The shared engine serves the hand-made policy, and its own weights again afterwards."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    follows = {
        a: b
        for text in ("=<tool>", "<tool>ans+2</tool>", "</obs><tool>")
        for a, b in pairwise(CharTokenizer().encode(text))
    }
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()  # the residual stream stays the last token's embedding
            elif name.endswith("layernorm.weight") or name == "model.norm.weight":
                weight.fill_(1.0)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.copy_(torch.randint(0, 2, embedding.shape, generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0)
        head.zero_()
        for token, following in follows.items():
            head[following] += 2.0 * embedding[token]
    model.save_pretrained(tmp_path)
    run(client.update_from_disk(str(tmp_path), weight_version=VERSION, flush_cache=True))
    yield
    run(client.update_from_disk(str(tiny_model), weight_version="0", flush_cache=True))


@pytest.mark.usefixtures("caller")
def test_er_13_and_er_04_and_ap_02_three_turns_with_a_tool(client: EngineClient, run: Run) -> None:
    tokenizer = CharTokenizer()
    call_ids = tokenizer.encode("<tool>ans+2</tool>")

    async def dialogue() -> None:
        env = Calculator(tokenizer=tokenizer, members=1, seed=0, max_turns=3)
        task, who = env.draw(), (11, 0)
        assert task is not None
        await env.prepare(task, who)
        (process,) = env.processes()
        c = Conversation(11, 3, task, 0)
        observed: list[list[int]] = []
        for turn in range(3):
            prompt = list(c.ids)
            limits = env.limits(task, 0, turn, len(prompt))
            g = await client.generate(
                rid=f"11-{turn}",
                input_ids=prompt,
                max_new_tokens=limits.max_new_tokens,
                stop_token_ids=limits.stop_token_ids,
            )
            assert g.output_ids == call_ids
            assert g.finish_reason == "stop"
            assert g.prompt_tokens == len(prompt)
            if turn:
                # All of the turn before, its stop token too: the scheduler had launched one step more.
                assert g.cached_tokens == len(prompt) - len(observed[-1])
            else:
                assert g.cached_tokens == 0
            c.answered(g, tuple((int(v), start, end) for v, start, end in g.spans))
            call = env.after_turn(task, 0, turn, g.output_ids)
            if turn == 2:
                assert call is None, "max_turns"
                break
            assert call is not None
            observed.append(await env.run_tool(task, who, call))
            assert env.processes() == [process], "one environment for all turns"
            c.observed(observed[-1])
            assert drift([*prompt, *g.output_ids], c.ids) == 0
            assert c.ids == next_prompt(prompt, g.output_ids, observed[-1])
        assert [tokenizer.decode(o) for o in observed] == ["<obs>2</obs>", "<obs>4</obs>"], "ans is kept between turns"
        await env.close()

        record = c.record()
        parts = [(call_ids, True), (observed[0], False), (call_ids, True), (observed[1], False), (call_ids, True)]
        assert record.token_ids.tolist() == [*task.prompt_ids, *(i for ids, _ in parts for i in ids)]
        assert record.loss_mask.tolist() == [mine for ids, mine in parts for _ in ids]
        assert [record.loss_mask[start:end].all() for start, end in record.turns] == [True] * 3
        assert {version for version, _, _ in record.spans} == {int(VERSION)}
        assert np.all(record.generation_log_probs[~record.loss_mask] == 0.0)
        assert np.all(record.generation_log_probs[record.loss_mask] > -1e-3)

    run(dialogue())
