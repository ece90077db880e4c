"""`tokensworth demo`: the packaged cascade on the packaged images."""

from collections.abc import Callable

from tokensworth.cascade import Cascade
from tokensworth.data.packaged import packaged_folder, packaged_images, packaged_statics
from tokensworth.exits import Macs, solve
from tokensworth.jobs.answers import answers
from tokensworth.jobs.study import Study, load_statics, run_study

# Budgets of the demo, as shares of the cost of running all stages.
BUDGETS = (0.25, 0.35, 0.5)


def run_demo(repeats: int = 3, say: Callable[[str], None] = lambda _: None) -> Study:
    """Calibrates on the packaged calibration images and studies three budgets on the packaged test images."""
    cascade = Cascade.from_pretrained(packaged_folder())
    say("calibrating")
    calibration = answers(cascade, packaged_images("calibration"))
    whole = calibration.exit_costs[-1]
    policies = [solve(calibration, Macs(share * whole)) for share in BUDGETS]
    statics = load_statics(list(packaged_statics().values()))
    return run_study(cascade, calibration, packaged_images("test"), statics, repeats=repeats, extra=policies, say=say)
