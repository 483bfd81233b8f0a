"""Stand-ins for trainer ranks (a transformers model without training) and small conveniences."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from real.learning.options import LossOptions
from real.trainer.trainer import Trainer
from real.weights.publisher import Publisher

PROMPT = [5, 17, 99, 3, 64, 23, 81, 42, 7, 11]
NEW_TOKENS = 6


@dataclass
class FakeOptions:
    model_path: str
    device: str = "cpu"
    dtype: str = "float32"


class FakeRank:
    """One of `world` ranks that share one model."""

    def __init__(self, rank: int, world: int, model: torch.nn.Module, options: FakeOptions) -> None:
        self.rank, self.world, self.model, self.options = rank, world, model, options
        self.publisher = Publisher(self)
        self._thread = ThreadPoolExecutor(1)

    def full_state(self, everywhere: bool = False) -> dict[str, torch.Tensor] | None:
        if not (everywhere or self.rank == 0):
            return None
        dtype = getattr(torch, self.options.dtype)
        return {n: t.detach().to(dtype, copy=True) for n, t in self.model.state_dict().items()}

    async def call(self, method: str, *args: Any) -> Any:
        """One call at a time in the order made, whoever still waits for it: as with a rank in another process."""
        assert method == "publish"
        return await asyncio.wrap_future(self._thread.submit(getattr(self.publisher, args[0]), *args[1:]))


class FakeTrainer(Trainer):
    """A `Trainer` over fake ranks; `step` changes the weights like an optimizer would."""

    def __init__(self, model_path: Path, world: int = 2, dtype: str = "float32") -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        options = FakeOptions(str(model_path), dtype=dtype)
        self.fakes = [FakeRank(rank, world, self.model, options) for rank in range(world)]
        super().__init__(self.fakes, LossOptions())
        self._generator = torch.Generator().manual_seed(0)

    def step(self, size: float = 0.02) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += size * torch.randn(parameter.shape, generator=self._generator)

    def log_probs_of(self, output: Sequence[int]) -> torch.Tensor:
        """Of `output` after PROMPT, by transformers with the weights as they are now."""
        ids = torch.tensor([PROMPT + list(output)])
        with torch.no_grad():
            logits = self.model(ids).logits[0, len(PROMPT) - 1 : -1].double()
        return logits.log_softmax(-1).gather(-1, ids[0, len(PROMPT) :, None])[:, 0]

    def close(self) -> None:
        for fake in self.fakes:
            fake.publisher.close()


async def answer(client: Any, rid: str, **options: Any) -> Any:
    return await client.generate(
        rid=rid, input_ids=PROMPT, max_new_tokens=NEW_TOKENS, temperature=1.0, ignore_eos=True, **options
    )


async def gap(client: Any, trainer: FakeTrainer, rid: str) -> float:
    """Largest difference between the engine's log-probs and those of the trainer's weights."""
    generated = await answer(client, rid)
    return float((torch.tensor(generated.log_probs).double() - trainer.log_probs_of(generated.output_ids)).abs().max())
