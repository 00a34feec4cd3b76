"""What is wrong with a dataset: findings, each with the SQL that shows it and what to do.

    report = diagnose(client, "hopper")
    for finding in report.findings:
        print(finding)
    version = make_version(client, plan_repair(client, report), "clean")

Nothing is downloaded: every check is a query, run by the service.
"""

from __future__ import annotations

from workbench.analysis.doctor.repair import Repair, make_version, plan_repair
from workbench.analysis.doctor.report import CHECKS, SEVERITIES, Finding, Report, diagnose

__all__ = [
    "CHECKS",
    "SEVERITIES",
    "Finding",
    "Repair",
    "Report",
    "diagnose",
    "make_version",
    "plan_repair",
]
