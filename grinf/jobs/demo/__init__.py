"""`grinf demo` without a terminal: real data, a retriever trained from nothing, and grinf on it."""

from grinf.jobs.demo.make import DemoPlan
from grinf.jobs.demo.report import DemoReport
from grinf.jobs.demo.run import run_demo

__all__ = ["DemoPlan", "DemoReport", "run_demo"]
