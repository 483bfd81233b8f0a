"""Recorded multi-turn sessions, one JSON object a line, in LLMServingSim's format.

Responsible for reading them and for what a session is as a task: its first input is the prompt, later inputs are
observations. It refuses to know what a session was about.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
from msgspec import Struct

from testbed.scenario.workload import SessionsWorkload
from testbed.workloads.errors import WorkloadError
from testbed.workloads.files import find, lines
from testbed.workloads.outcomes import needs_environment, outcomes
from testbed.workloads.plan import BLOCK_TOKENS, Plan, Task, prompt_content
from testbed.workloads.trace import explain, fresh_blocks


class SubRequest(Struct):
    """One model call. The tool that follows the last call is not waited for by anything, and not used."""

    input_toks: int
    """Tokens added in front of this call."""
    output_toks: int
    tool_duration_ns: float = 0.0


class Session(Struct):
    session_id: str | int
    arrival_time_ns: float
    sub_requests: list[SubRequest]


def read_sessions(name: str, base_dir: Path) -> tuple[list[Session], str]:
    """(sessions in order of arrival, SHA-256 of the file). Raises WorkloadError with the line of the first fault."""
    path, digest = find(name, base_dir), hashlib.sha256()
    decode = msgspec.json.Decoder(Session).decode
    sessions = []
    for number, line in lines(path, digest):
        try:
            session = decode(line)
        except msgspec.DecodeError as error:
            raise WorkloadError(path, number, explain(error)) from error
        fault = _fault(session)
        if fault:
            raise WorkloadError(path, number, f"session {session.session_id!r}: {fault}")
        sessions.append(session)
    if not sessions:
        raise WorkloadError(path, None, "holds no session")
    sessions.sort(key=lambda session: session.arrival_time_ns)
    return sessions, digest.hexdigest()


def _fault(session: Session) -> str:
    """What makes a well-formed session impossible; empty if nothing does."""
    if not session.sub_requests:
        return "`sub_requests` is empty"
    if session.arrival_time_ns < 0:
        return "`arrival_time_ns` is negative"
    for turn, call in enumerate(session.sub_requests):
        if call.output_toks < 1:
            return f"`sub_requests[{turn}].output_toks` must be at least 1"
        if call.input_toks < (turn == 0):
            return f"`sub_requests[{turn}].input_toks` must be at least {int(turn == 0)}"
        if call.tool_duration_ns < 0:
            return f"`sub_requests[{turn}].tool_duration_ns` is negative"
    return ""


def session_tasks(
    config: SessionsWorkload, sessions: list[Session], members: int, seed: int, ignore_eos: bool
) -> Iterator[Task]:
    """One task per session in order of arrival; all members do the same calls, cut at the cap."""
    environment = needs_environment(config.tools)
    results = outcomes(config.rewards, config.tools, members, seed)
    cap = config.max_response_length
    for index, session in enumerate(sessions[: config.max_sessions]):
        calls = session.sub_requests
        outputs = tuple([cap if ignore_eos else min(call.output_toks, cap) for call in calls])
        stops = tuple([tokens < cap for tokens in outputs])
        tool_s = tuple([call.tool_duration_ns / 1e9 for call in calls[:-1]])
        observed = tuple([call.input_toks for call in calls[1:]])
        plans = [Plan(outputs, stops, tool_s, observed, *outcome) for outcome in islice(results, members)]
        tokens = calls[0].input_toks
        prompt = ((prompt_content(index), 0, tokens),)
        yield Task(index, prompt, tokens, fresh_blocks(index, tokens), BLOCK_TOKENS, environment, plans)
