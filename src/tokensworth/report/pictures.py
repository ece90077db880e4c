"""The galleries: the easiest and the hardest images of each exit."""

import base64
import io
from dataclasses import dataclass

import numpy as np

from tokensworth.exits.policy import Policy
from tokensworth.jobs.study import Study


@dataclass(frozen=True)
class Picture:
    """One image of a gallery: its data URI, what was said of it, and whether that was right."""

    uri: str
    caption: str
    right: bool


def data_uri(study: Study, index: int, side: int = 96) -> str:
    """A test image as a small PNG inside the page."""
    image = study.images.read(index)
    image.thumbnail((side, side))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def gallery(study: Study, policy: Policy, count: int = 10) -> list[dict[str, object]]:
    """Per exit, the surest and the least sure of the images that leave there under a policy."""
    exits = study.leaving(policy)
    names = study.cascade.config.class_names
    out = []
    for index in range(study.cascade.num_stages):
        members = np.flatnonzero(exits == index)
        order = members[np.argsort(-study.test.scores[index][members], kind="stable")]

        def picture(i: int, index: int = index) -> Picture:
            said, truth = int(study.test.predictions[index][i]), int(study.test.labels[i])
            label = names[said] if names else str(said)
            true = names[truth] if names else str(truth)
            sure = study.test.confidences[index][i]
            caption = f"{label}, {sure:.0%}" + ("" if said == truth else f" (is {true})")
            return Picture(data_uri(study, i), caption, said == truth)

        easy = [picture(int(i)) for i in order[:count]]
        hard = [picture(int(i)) for i in order[::-1][: min(count, max(0, len(order) - count))]]
        out.append({"exit": index + 1, "count": len(members), "easy": easy, "hard": hard})
    return out
