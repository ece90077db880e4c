"""One HTML page that needs nothing else: plotly and all images are inside."""

import json
from pathlib import Path
from typing import Any

import tokensworth
from tokensworth.errors import MissingExtraError
from tokensworth.exits.goals import show_cost
from tokensworth.exits.policy import Policy
from tokensworth.files import write_text
from tokensworth.jobs.study import Study
from tokensworth.measure.machine import machine
from tokensworth.report.pictures import gallery
from tokensworth.report.plots import class_figure, macs_figure, time_figure
from tokensworth.report.tables import CAPTION, HEADER, static_rows, study_rows


def _plot(figure: Any, name: str, first: bool = False) -> str:
    import plotly.io as pio

    return pio.to_html(
        figure,
        full_html=False,
        include_plotlyjs=first,
        div_id=name,
        config={"displaylogo": False, "responsive": True},
    )


def middle_policy(study: Study) -> Policy:
    """The cheapest policy within half a point of the best calibration accuracy: where most users would sit."""
    best = max(p.accuracy for p in study.frontier.policies)
    return next(p for p in study.frontier.policies if p.accuracy >= best - 0.005)


def _slider(study: Study, policy: Policy) -> dict[str, Any]:
    """The slider's stops, and the one it starts at."""
    stops = [
        {
            "accuracy": p.accuracy,
            "low": p.low,
            "high": p.high,
            "macs": p.macs,
            "cost": show_cost(p.macs, "MACs"),
            "saved": 1 - p.macs / study.everything.macs,
            "shares": list(p.shares),
            "thresholds": list(p.policy.thresholds) if p.policy else [],
        }
        for p in study.curve
    ]
    return {"stops": stops, "start": study.frontier.policies.index(policy)}


def write_report(study: Study, path: str | Path, title: str = "tokensworth report") -> None:
    """Writes the page atomically.

    Raises:
        MissingExtraError: plotly or jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, select_autoescape
    except ImportError:
        raise MissingExtraError("the report", "report") from None
    policy = middle_policy(study)
    environment = Environment(loader=PackageLoader("tokensworth.report"), autoescape=select_autoescape())
    html = environment.get_template("report.html").render(
        title=title,
        version=tokensworth.__version__,
        machine=machine(),
        study=study,
        header=HEADER,
        caption=CAPTION,
        rows=study_rows(study, study.timed),
        statics=static_rows(study),
        macs_plot=_plot(macs_figure(study), "macs", first=True),
        time_plot=_plot(time_figure(study), "time"),
        class_plot=_plot(class_figure(study, policy), "classes"),
        slider=json.dumps(_slider(study, policy)),
        gallery=gallery(study, policy),
        policy=policy,
        policy_cost=show_cost(policy.cost, policy.unit),
        errors=study.calibration.calibration_errors(),
    )
    write_text(path, html)
