"""The main job: strategies side by side on one model, values before times.

Stands above runtime, models and compiler; nothing of ours but the command line imports it.
"""

from .measure import compare
from .options import CompareOptions
from .report import ComparisonReport, report_from_json, write_report

__all__ = ["CompareOptions", "ComparisonReport", "compare", "report_from_json", "write_report"]
