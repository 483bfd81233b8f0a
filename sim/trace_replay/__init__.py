"""A recorded run of a real SGLang scheduler, replayed on the engine model batch by batch.

| question | module |
|---|---|
| what does a trace say, and which settings of a server are modelled? | `trace` |
| which rule of the scheduler is behind a difference? | `rules` |
| does the model do the same, iteration by iteration and in runs? | `replay` |
"""

from sim.trace_replay.replay import Replay, replay
from sim.trace_replay.rules import RULES, Rule
from sim.trace_replay.trace import TraceError, load

__all__ = ["RULES", "Replay", "Rule", "TraceError", "load", "replay"]
