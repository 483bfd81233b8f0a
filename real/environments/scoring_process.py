"""The verifier's own process: scores answers with math-verify or with a reasoning-gym data set.

Its main thread does the work, because math-verify limits its own time by a signal. Refuses to know token ids and
prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from real.environments.serve import serve


def mathematical() -> Callable[[Any], dict[str, Any]]:
    """{"gold", "answer"} -> {"score"}: 1 if what math-verify finds in both is equal."""
    from math_verify import parse, verify

    return lambda request: {"score": float(verify(parse(request["gold"]), parse(request["answer"])))}


def generated(dataset: str, options: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """{"index", "answer"} -> {"score"}: the data set's own score. The entry is made again from its index."""
    import reasoning_gym

    data = reasoning_gym.create_dataset(dataset, **options)
    return lambda request: {"score": float(data.score_answer(answer=request["answer"], entry=data[request["index"]]))}


def _guarded(score: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    def answer(request: Any) -> dict[str, Any]:
        try:
            return score(request)
        except Exception as error:  # verifiers fail in their own ways on what a policy writes
            return {"error": f"{type(error).__name__}: {error}"}

    return answer


if __name__ == "__main__":
    serve(_guarded(generated(sys.argv[1], json.loads(sys.argv[2])) if len(sys.argv) > 1 else mathematical()))
