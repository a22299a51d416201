"""Offline recall: parquet queries in, parquet answers out, in units that are committed one by one."""

from grinf.jobs.recall.job import run_recall
from grinf.jobs.recall.report import RecallReport

__all__ = ["RecallReport", "run_recall"]
