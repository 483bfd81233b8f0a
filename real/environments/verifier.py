"""A verifier in a helper process: an answer's score, or 0 and a warning if the verifier fails on it.

Refuses to know how answers are scored."""

from __future__ import annotations

import logging
from typing import Any

from real.environments.helper import Helper, HelperDied, HelperTimeout

log = logging.getLogger(__name__)

SCORE_TIMEOUT_S = 30.0


class Verifier:
    def __init__(self, *arguments: str) -> None:
        self._helper = Helper("real.environments.scoring_process", *arguments)

    async def open(self) -> None:
        await self._helper.start()

    async def score(self, request: dict[str, Any]) -> float:
        try:
            reply = await self._helper.ask(request, SCORE_TIMEOUT_S)
        except (HelperTimeout, HelperDied) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        if "error" in reply:
            log.warning("answer %.80r was not scored (%s): reward 0", request["answer"], reply["error"])
            return 0.0
        return float(reply["score"])

    async def close(self) -> None:
        await self._helper.stop()
