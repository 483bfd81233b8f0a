"""One engine, asked over HTTP: SGLang's native protocol, token ids in and out.

Responsible for the requests, for what SGLang's answers mean (refused, gone, written but not flushed) and for sending
one generation at most once at a time per id. Refuses to know processes, schedules and what the tokens mean.

Errors of every method: `EngineRefused` (the engine said no), `EngineGone` (no answer: connection lost or timed out)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from real.engines.answers import Generated, Loads, read_generated, read_loads
from real.errors import EngineGone, EngineRefused

RID_END = ";"
"""Ends every request id on the wire. SGLang aborts each request whose id *begins* with the given one, so without it
aborting `1-1` would also end `1-10`."""
_KEEPALIVE_S = 2.0
"""SGLang's HTTP server drops connections idle for 5 s; dropping them earlier here leaves no request on a dying one."""
_RESEND_S = 15.0
"""How long a lost request's id may stay taken: SGLang looks for closed connections every 4 s."""


LETS_GO_S = 0.02
"""From a request's answer until its handler in the server has let go of the lock that an aborting pause looks at."""


class EngineClient:
    """Client of one engine; used from one event loop."""

    def __init__(self, url: str, *, timeout_s: float = 600.0) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._open: dict[str, asyncio.Task[Generated]] = {}
        self._lost: set[str] = set()
        self._top_k: int | None = None

    async def close(self) -> None:
        """Drop open requests (the engine aborts what nobody waits for) and connections."""
        for task in self._open.values():
            task.cancel()
        await asyncio.gather(*self._open.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- generation ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        *,
        rid: str,
        input_ids: Sequence[int],
        max_new_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        extra_key: str | None = None,
        return_routed_experts: bool = False,
    ) -> Generated:
        """Generate, and return when the request has ended, an aborted one with the tokens it had.

        `rid` makes it idempotent: while a request with this id is open here, another call waits for that one instead of
        sending (its other arguments are not looked at), also after the first caller was cancelled. An id that another
        client has open is refused (400). An id whose connection was lost may be sent again: what is left of it is
        aborted first. `extra_key` separates the prefix cache: requests share KV only under the same key.
        `ignore_eos` makes SGLang ignore `stop_token_ids` too.

        Log-probabilities are of softmax(logits / temperature), what a trainer gets that divides its logits by the same
        temperature. At temperature 0 SGLang takes the arg max and reports them at temperature 1. `top_p` and `top_k`
        restrict what is sampled, but the reported values are not renormalised over what they leave.

        Raises:
            ValueError: `rid` contains the end mark.
        """
        if RID_END in rid:
            raise ValueError(f"request id {rid!r} contains {RID_END!r}")
        task = self._open.get(rid)
        if task is None:
            request: dict[str, Any] = {
                "rid": rid + RID_END,
                "input_ids": list(input_ids),
                "sampling_params": {
                    "max_new_tokens": max_new_tokens,
                    "temperature": temperature,
                    "top_p": top_p,
                    "top_k": top_k,
                    "stop_token_ids": list(stop_token_ids) or None,
                    "ignore_eos": ignore_eos,
                },
                "return_logprob": True,
                "extra_key": extra_key,
                "return_routed_experts": return_routed_experts,
            }
            task = asyncio.create_task(self._generate(rid, request))
            self._open[rid] = task
            task.add_done_callback(lambda done: self._ended(rid, done))
        return await asyncio.shield(task)

    def _ended(self, rid: str, task: asyncio.Task[Generated]) -> None:
        del self._open[rid]
        if not task.cancelled():
            task.exception()  # looked at: callers may all be gone

    async def _generate(self, rid: str, request: dict[str, Any]) -> Generated:
        top_k = await self._experts_per_token() if request["return_routed_experts"] else None
        sent_t = time.monotonic()
        try:
            answer = await (self._send_again(rid, request) if rid in self._lost else self.post("/generate", request))
        except (EngineGone, asyncio.CancelledError):
            self._lost.add(rid)
            raise
        self._lost.discard(rid)
        return read_generated(answer, len(request["input_ids"]), top_k, sent_t)

    async def _send_again(self, rid: str, request: dict[str, Any]) -> Any:
        """Send a request whose first connection was lost. Until the engine has ended the first, its id is taken, and
        nothing tells when: ask with growing pauses."""
        give_up, pause = time.monotonic() + _RESEND_S, 0.05
        while True:
            await self.abort(rid)
            try:
                return await self.post("/generate", request)
            except EngineRefused as refused:
                if "Duplicate request ID" not in refused.message or time.monotonic() > give_up:
                    raise
            await asyncio.sleep(pause)
            pause = min(1.0, 2 * pause)

    async def _experts_per_token(self) -> int:
        if self._top_k is None:
            folder = Path((await self.get("/model_info"))["model_path"])
            self._top_k = int(json.loads((folder / "config.json").read_text())["num_experts_per_tok"])
        return self._top_k

    async def abort(self, rid: str) -> None:
        """End one request; its `generate` returns with what it has, or without tokens if it waits in the queue (also
        where it was retracted to it). Unknown ids are ignored. A request held by `in_place` ends after `resume`; one
        that reached a paused engine and was not taken in runs after `resume` all the same."""
        await self.post("/abort_request", {"rid": rid + RID_END})

    async def abort_all(self) -> None:
        await self.post("/abort_request", {"abort_all": True})

    # --- pausing and the cache ----------------------------------------------------------------------------------------

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Stop generating. `abort` ends all requests; `retract` sends them back to the queue and their KV is computed
        again after `resume`; `in_place` freezes them with their KV. New requests wait until `resume`."""
        if mode == "abort":
            # SGLang looks once a second whether the aborted have gone; have them gone before it looks.
            if self._open:
                await self.abort_all()
                await asyncio.wait(self._open.values(), timeout=1.0)
            await asyncio.sleep(LETS_GO_S)
        await self.post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Continue generating."""
        await self.post("/continue_generation", {})

    async def flush(self) -> bool:
        """Empty the prefix cache. False: refused, because requests run or wait (or are held by `in_place`)."""
        status, body = await self._request("POST", "/flush_cache")
        if status not in (200, 400):
            raise EngineRefused(status, body.decode(errors="replace"))
        return status == 200

    # --- weights ------------------------------------------------------------------------------------------------------

    async def begin_update(self) -> None:
        """Open a weight-update session, which updates from tensors and from a group need. On an engine that is not
        paused it waits until no request runs. Refused while one is open."""
        await self.post("/begin_weight_update", {})

    async def end_update(self) -> None:
        await self.post("/end_weight_update", {})

    async def update_from_tensor(
        self, serialized: list[str], *, load_format: str | None, weight_version: str | None, flush_cache: bool
    ) -> None:
        """Load tensors handed over by SGLang's `MultiprocessingSerializer` (base64), one string for each TP rank.
        `load_format`: None, `flattened_bucket`, or one of the server's `custom_weight_loader` functions."""
        request = {
            "serialized_named_tensors": serialized,
            "load_format": load_format,
            "weight_version": weight_version,
            "flush_cache": False,
        }
        await self._update("/update_weights_from_tensor", request, flush_cache)

    async def update_from_disk(self, path: str | Path, *, weight_version: str, flush_cache: bool) -> None:
        """Load a folder of safetensors. Needs no session."""
        request = {"model_path": str(path), "weight_version": weight_version, "flush_cache": False}
        await self._update("/update_weights_from_disk", request, flush_cache)

    async def init_weights_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """Join a process group with the trainer; answers when all `world_size` have joined."""
        request = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self.post("/init_weights_update_group", request)

    async def destroy_weights_group(self, group_name: str) -> None:
        await self.post("/destroy_weights_update_group", {"group_name": group_name})

    async def update_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        weight_version: str | None,
        flush_cache: bool,
    ) -> None:
        """Receive these tensors from rank 0 of the group, which broadcasts them in this order."""
        request = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "weight_version": weight_version,
            "flush_cache": False,
        }
        await self._update("/update_weights_from_distributed", request, flush_cache)

    async def _update(self, path: str, request: dict[str, Any], flush_cache: bool) -> None:
        """Update, then flush as a second step. Asked to flush in the same call while requests are held, SGLang writes
        the weights, answers 400 and keeps the old version's name: two calls tell a refused update from a refused
        flush, and the version name is right after either."""
        await self.post(path, request)
        if flush_cache and not await self.flush():
            what = "the weights are updated, but the cache still holds KV of the old ones: requests run or are held"
            raise EngineRefused(400, what)

    async def set_weight_version(self, version: str) -> None:
        """Name the weights in place, from the next token on; for updates that did not name them."""
        await self.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def weight_version(self) -> str:
        version: str = (await self.get("/model_info"))["weight_version"]
        return version

    # --- memory, load, health -----------------------------------------------------------------------------------------

    async def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Give up the memory of `kv_cache`, `weights` (None: all); freed for real where the server runs with
        `enable_memory_saver`. Empties the prefix cache. Refused while requests run: asked then, SGLang's scheduler
        would fail an assertion and end, so the flush asks first, on the same condition."""
        if not await self.flush():
            raise EngineRefused(400, "memory is not released while requests run: pause with retract or abort first")
        await self.post("/release_memory_occupation", {"tags": list(tags) if tags else None})

    async def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again. Released weights come back as they were only if the memory saver keeps a copy."""
        await self.post("/resume_memory_occupation", {"tags": list(tags) if tags else None})

    async def loads(self) -> Loads:
        """Load report; about 12 ms of the engine's HTTP process, nearly all of it for `/metrics`. While the engine is
        paused it is the last one from before."""
        loads, (status, metrics) = await asyncio.gather(
            self.get("/v1/loads?include=core"), self._request("GET", "/metrics")
        )
        if status != 200:
            raise EngineRefused(status, metrics.decode(errors="replace"))
        return read_loads(loads, metrics.decode())

    async def health(self) -> bool:
        """Whether the server answers and is not ending; True while it is paused."""
        try:
            status, _ = await self._request("GET", "/health", timeout_s=10.0)
        except EngineGone:
            return False
        return status == 200

    # --- transport ----------------------------------------------------------------------------------------------------

    async def post(self, path: str, request: dict[str, Any]) -> Any:
        """Any other call of the native protocol; its decoded answer."""
        return _accepted(*await self._request("POST", path, request))

    async def get(self, path: str) -> Any:
        return _accepted(*await self._request("GET", path))

    async def _request(
        self, method: str, path: str, request: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> tuple[int, bytes]:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector)
        body = None if request is None else msgspec.json.encode(request)
        headers = {} if request is None else {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)
        try:
            async with self._session.request(
                method, self.url + path, data=body, headers=headers, timeout=timeout
            ) as answer:
                return answer.status, await answer.read()
        except TimeoutError:
            raise EngineGone(f"{self.url}{path}: no answer within {timeout.total:g} s") from None
        except aiohttp.ClientError as error:
            raise EngineGone(f"{self.url}{path}: {error or type(error).__name__}") from None


def _accepted(status: int, body: bytes) -> Any:
    """The decoded answer, or `EngineRefused` for a status that is not 200 or a `success` that is false."""
    try:
        answer = msgspec.json.decode(body) if body else None
    except msgspec.DecodeError:
        answer = body.decode(errors="replace")
    if status == 200 and not (isinstance(answer, dict) and answer.get("success") is False):
        return answer
    message = answer
    if isinstance(answer, dict):
        message = answer.get("message") or answer.get("detail") or answer.get("error")
        message = message.get("message") if isinstance(message, dict) else message
    raise EngineRefused(status, str(message))
