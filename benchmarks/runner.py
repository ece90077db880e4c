"""Whether saved MACs become saved time: the share of time saved over the share of MACs saved.

The packaged cascade on the packaged test images, against running all stages; sides alternate in one process.
"""

import argparse

from common import finish
from tokensworth.cascade import Cascade
from tokensworth.data.packaged import packaged_folder, packaged_images
from tokensworth.exits import Macs, Policy, solve
from tokensworth.jobs.answers import all_tensors, answers
from tokensworth.jobs.study import cascade_point, pass_over
from tokensworth.measure.timing import alternate
from tokensworth.run.runner import Runner

SHARES = (0.2, 0.3, 0.4, 0.5, 0.7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    cascade = Cascade.from_pretrained(packaged_folder())
    known = answers(cascade, packaged_images("calibration"))
    images = packaged_images("test")
    test = answers(cascade, images)
    tensors, _ = all_tensors(images, cascade.config)
    whole = cascade_point("all stages", test, Policy.run_all(cascade.num_stages))
    policies = [solve(known, Macs(share * whole.macs)) for share in SHARES]
    runners = {"all stages": Runner(cascade, batch_size=options.batch)}
    runners |= {p.goal: Runner(cascade, p, batch_size=options.batch) for p in policies}
    times = alternate({name: pass_over(r, tensors) for name, r in runners.items()}, options.repeats)
    rows, points = [], []
    for policy in policies:
        point = cascade_point(policy.goal, test, policy)
        macs_saved = 1 - point.macs / whole.macs
        time_saved = 1 - times[policy.goal].median / times["all stages"].median
        points.append({"macs_saved": macs_saved, "time_saved": time_saved, "accuracy": point.accuracy})
        cells = (f"{macs_saved:.1%}", f"{time_saved:.1%}", f"{time_saved / macs_saved:.3f}")
        rows.append((policy.goal, f"{100 * point.accuracy:.2f}", *cells))
    title = f"batch {options.batch}: share of time saved over share of MACs saved"
    header = ("policy", "accuracy %", "MACs saved", "time saved", "time over MACs")
    value = {
        "seed": 0,
        "batch": options.batch,
        "repeats": options.repeats,
        "points": points,
        "seconds": {name: t.seconds for name, t in times.items()},
    }
    finish("runner", title, header, rows, value)


if __name__ == "__main__":
    main()
