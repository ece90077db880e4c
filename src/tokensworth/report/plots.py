"""The figures of the report, as plotly figures."""

from typing import Any

import numpy as np

from tokensworth.errors import MissingExtraError
from tokensworth.exits.outcome import leaving_exit
from tokensworth.exits.policy import Policy
from tokensworth.jobs.study import Point, Study

_CASCADE, _STATIC, _EXIT, _MARK = "#1f6feb", "#d1242f", "#57606a", "#f2a900"


def _plotly() -> Any:
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise MissingExtraError("the report", "report") from None
    return go


def _band(go: Any, x: list[float], points: list[Point]) -> Any:
    highs, lows = [100 * p.high for p in points], [100 * p.low for p in points]
    return go.Scatter(
        x=x + x[::-1],
        y=highs + lows[::-1],
        fill="toself",
        fillcolor="rgba(31,111,235,0.15)",
        line={"width": 0},
        hoverinfo="skip",
        name="95 % interval",
    )


def _trace(go: Any, x: list[float], points: list[Point], name: str, color: str, mode: str, **marker: Any) -> Any:
    errors = {"type": "data", "symmetric": False, "thickness": 1}
    errors["array"] = [100 * (p.high - p.accuracy) for p in points]
    errors["arrayminus"] = [100 * (p.accuracy - p.low) for p in points]
    return go.Scatter(
        x=x,
        y=[100 * p.accuracy for p in points],
        mode=mode,
        name=name,
        text=[p.name for p in points],
        error_y=errors if mode != "lines" else None,
        line={"color": color, "width": 2},
        marker={"color": color, "size": 9, **marker},
        hovertemplate="%{text}<br>%{x:.3g}<br>%{y:.2f} %<extra></extra>",
    )


def _layout(figure: Any, title: str, x: str) -> Any:
    figure.update_layout(
        title=title,
        xaxis_title=x,
        yaxis_title="accuracy on the test images, %",
        template="plotly_white",
        height=460,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        legend={"orientation": "h", "y": -0.2},
    )
    return figure


def macs_figure(study: Study) -> Any:
    """Accuracy against mean MACs: the frontier with its interval, the static models, each exit alone."""
    go = _plotly()
    figure = go.Figure()
    millions = [p.macs / 1e6 for p in study.curve]
    figure.add_trace(_band(go, millions, study.curve))
    figure.add_trace(_trace(go, millions, study.curve, "cascade", _CASCADE, "lines"))
    groups = [
        (study.statics, "static models", _STATIC, "lines+markers", "square"),
        (study.exits, "each exit alone", _EXIT, "markers", "diamond"),
    ]
    for points, name, color, mode, symbol in groups:
        x = [p.macs / 1e6 for p in points]
        figure.add_trace(_trace(go, x, points, name, color, mode, symbol=symbol))
    figure.add_trace(
        go.Scatter(x=[0], y=[0], mode="markers", name="chosen", marker={"size": 14, "color": _MARK, "symbol": "star"})
    )
    return _layout(figure, "Accuracy against compute", "mean million MACs per image")


def time_figure(study: Study) -> Any:
    """Accuracy against measured time per image."""
    go = _plotly()
    figure = go.Figure()
    timed = sorted((p for p in study.timed if p.rate), key=lambda p: -p.rate)
    x = [1000 / p.rate for p in timed]
    figure.add_trace(_band(go, x, timed))
    figure.add_trace(_trace(go, x, timed, "cascade", _CASCADE, "lines+markers"))
    statics = [p for p in study.statics if p.rate]
    static_x = [1000 / p.rate for p in statics]
    figure.add_trace(_trace(go, static_x, statics, "static models", _STATIC, "lines+markers", symbol="square"))
    whole = [study.everything]
    whole_x = [1000 / study.everything.rate]
    figure.add_trace(_trace(go, whole_x, whole, "all stages", _EXIT, "markers", symbol="diamond"))
    return _layout(figure, f"Accuracy against measured time, batch {study.batch}", "milliseconds per image")


def class_figure(study: Study, policy: Policy) -> Any:
    """Accuracy that each class loses against running all stages, in points."""
    go = _plotly()
    exits = leaving_exit(study.test.scores, np.asarray(policy.thresholds))
    right = np.take_along_axis(study.test.right, exits[None], axis=0)[0].astype(float)
    whole = study.test.right[-1].astype(float)
    names = study.cascade.config.class_names or tuple(map(str, range(study.cascade.config.num_classes)))
    labels = study.test.labels
    present = [c for c in range(len(names)) if (labels == c).any()]
    lost = [100 * float((whole - right)[labels == c].mean()) for c in present]
    order = np.argsort(lost)[::-1][:40]
    figure = go.Figure(go.Bar(x=[names[present[i]] for i in order], y=[lost[i] for i in order], marker_color=_CASCADE))
    figure.update_layout(
        title="Accuracy lost per class against running all stages",
        yaxis_title="points",
        template="plotly_white",
        height=340,
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
    )
    return figure
