"""Rules that judge a trace, one module each, and the diagnosis that prices and ranks what they find."""

from hotloop.doctor.rules.diagnose import RULES, Diagnosis, diagnose
from hotloop.doctor.rules.finding import Case, Finding, Rule

__all__ = ["RULES", "Case", "Diagnosis", "Finding", "Rule", "diagnose"]
