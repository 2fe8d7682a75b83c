"""Install each built archive into an environment of its own and check that it works there.

Usage: python tools/check_package.py dist/*.whl dist/*.tar.gz

Covey comes from the archive alone; what it depends on is read from the environment that runs this script.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

CHECK = """
from importlib.metadata import version
from pathlib import Path
import covey
home = Path(covey.__file__).parent
assert home.is_relative_to({environment!r}), f"covey was imported from {{home}}, which is not the archive's"
assert version("covey") == covey.__version__, (version("covey"), covey.__version__)
for name in covey.__all__:
    getattr(covey, name)
assert list((home / "examples" / "accelerate_configs").glob("*.yaml")), "accelerate_configs is missing"
assert (home / "py.typed").exists(), "py.typed is missing"
"""


def check(archive: Path) -> None:
    """Install an archive without its dependencies, import all public names, run `covey env` and `covey init`."""
    with tempfile.TemporaryDirectory() as folder:
        environment = str(Path(folder).resolve())
        venv.create(environment, with_pip=True)
        scripts = Path(environment, "bin")
        subprocess.run([scripts / "pip", "install", "--quiet", "--no-deps", str(archive)], check=True)
        # Packages on a path in a .pth file can be imported, but .pth files there (an editable Covey) have no effect.
        packages = next(Path(environment, "lib").glob("python*/site-packages"))
        (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        for command in (
            [scripts / "python", "-c", CHECK.format(environment=environment)],
            [scripts / "covey", "env"],
            [scripts / "covey", "init", "first"],
            [scripts / "python", "-c", "from covey.observability.metric_docs import meaning; assert meaning('reward')"],
        ):
            subprocess.run(command, check=True, cwd=folder, env=outside)
        print(f"{archive.name}: installs, imports and runs")


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit(__doc__)
    for name in sys.argv[1:]:
        check(Path(name).resolve())
