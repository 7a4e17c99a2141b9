"""What was found, told: for a terminal, as JSON, as an HTML page, as an overlay for Perfetto, two traces compared."""

from hotloop.doctor.report.compare import compare_facts, format_comparison
from hotloop.doctor.report.facts import gather_facts
from hotloop.doctor.report.html import make_html
from hotloop.doctor.report.kept import keep_in_runs, load_report
from hotloop.doctor.report.overlay import make_overlay
from hotloop.doctor.report.page import format_page

__all__ = [
    "compare_facts",
    "format_comparison",
    "format_page",
    "gather_facts",
    "keep_in_runs",
    "load_report",
    "make_html",
    "make_overlay",
]
