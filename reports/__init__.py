"""Reports: run summaries in, one self-contained HTML page, Markdown, CSV and JSON out; and a trace for Perfetto.

Start with `build_comparison` and `write_report`. It imports `testbed` alone, and refuses to know how a run was made.
"""

from reports.comparison import Comparison, ComparisonError, VariantRuns, build_comparison
from reports.perfetto import write_trace
from reports.tables import comparison_figures
from reports.write import write_report, write_run_report

__all__ = [
    "Comparison",
    "ComparisonError",
    "VariantRuns",
    "build_comparison",
    "comparison_figures",
    "write_report",
    "write_run_report",
    "write_trace",
]
