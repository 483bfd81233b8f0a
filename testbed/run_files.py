"""Names of the files of a run folder, whichever backend made it. Imports nothing: every command may ask."""

from __future__ import annotations

SCENARIO = "scenario.yaml"
JOURNAL = "journal.jsonl.zst"
METRICS = "metrics.parquet"
SUMMARY = "summary.json"
SPEED = "machine_speed.json"
CALIBRATION = "calibration"
"""Folder of a calibration's short runs, beside the first run of its deployment."""
