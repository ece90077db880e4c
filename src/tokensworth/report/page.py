"""One HTML page that needs nothing else: plotly and all images are inside."""

import json
from pathlib import Path
from typing import Any

import numpy as np

import tokensworth
from tokensworth.errors import MissingExtraError
from tokensworth.exits.goals import show_cost
from tokensworth.exits.policy import Policy
from tokensworth.files import write_text
from tokensworth.jobs.answers import all_tensors
from tokensworth.jobs.showing import shown_tokens
from tokensworth.jobs.study import Study
from tokensworth.measure.machine import machine
from tokensworth.report.pictures import gallery
from tokensworth.report.plots import class_figure, macs_figure, time_figure
from tokensworth.report.tables import CAPTION, HEADER, static_rows, study_rows
from tokensworth.report.tokens import PanelRow, panel_row

# Test images whose chosen tokens are shown.
_SHOWN = 4


def embedded_plot(figure: Any, name: str, first: bool = False) -> str:
    """A plotly figure as HTML; the first of a page brings the library."""
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


def _token_rows(study: Study) -> list[PanelRow]:
    """Which tokens take part for a few test images; empty for a cascade without ToSA."""
    if study.cascade.config.tokens is None:
        return []
    tensors, _ = all_tensors(study.images.select(np.arange(min(_SHOWN, len(study.images)))), study.cascade.config)
    shown = (shown_tokens(study.cascade, x, study.images.name(i)) for i, x in enumerate(tensors))
    return [panel_row(image) for image in shown]


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
        macs_plot=embedded_plot(macs_figure(study), "macs", first=True),
        time_plot=embedded_plot(time_figure(study), "time"),
        class_plot=embedded_plot(class_figure(study, policy), "classes"),
        slider=json.dumps(_slider(study, policy)),
        gallery=gallery(study, policy),
        policy=policy,
        policy_cost=show_cost(policy.cost, policy.unit),
        images=_token_rows(study),
        errors=study.calibration.calibration_errors(),
    )
    write_text(path, html)
