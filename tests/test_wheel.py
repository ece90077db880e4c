"""The wheel builds, installs and runs."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_wheel_builds_installs_and_runs(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for wanted in ("py.typed", "assets/cifar10/model.safetensors", "report/templates/report.html"):
        assert f"tokensworth/{wanted}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    script = (
        "import tokensworth as tw, sys; assert tw.__file__.startswith(sys.argv[1]), tw.__file__;"
        "from tokensworth.data.packaged import packaged_folder, packaged_images;"
        "m = tw.Cascade.from_pretrained(packaged_folder()); i = packaged_images('test');"
        "print([r.class_name for r in tw.Runner(m).predict([i.items[0], i.items[1]])])"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run(
        [sys.executable, "-c", script, str(site)], check=True, capture_output=True, text=True, env=environment
    )
    assert run.stdout.startswith("['")
