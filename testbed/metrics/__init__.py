"""Folds over events and actions, streamed in a run or over a journal afterwards.

They decide nothing and keep nothing that ended.

| question | module |
|---|---|
| which figures does a run have? | `summary` |
| how are they put together? | `run` |
| how stale, by whose definition? | `staleness` |
| what did each GPU do or wait for? | `gpu_time`, reckoned by `lanes` |
| where did a trajectory's time go? | `trajectory` |
| what did a batch hold? | `batch` |
| which tokens were generated, reused, thrown away? | `tokens` |
| how long did a publication of weights take? | `updates` |
| why did admission and the trainer wait? | `waits` |
| mean and quantiles of a stream? | `sketch` |
| what is a fold? | `fold` |
| from and to files? | `files` |
"""

from testbed.metrics.files import read_summary, summary_from_journal, write_metrics
from testbed.metrics.meta import RunMeta
from testbed.metrics.run import EventCounter, RunMetrics
from testbed.metrics.summary import RunSummary

__all__ = [
    "EventCounter",
    "RunMeta",
    "RunMetrics",
    "RunSummary",
    "read_summary",
    "summary_from_journal",
    "write_metrics",
]
