"""Build wheel and sdist, install each in an empty environment, and use it there: what `make dist` runs.

The environments see nothing of this clone: commands run in a temporary folder, with the installed package alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
ROWS = ((site, k, (1 if site in "ab" else -1) * k + k % 3 / 10) for site in "abcd" for k in range(9))
TABLE = "site,x,y\n" + "".join(f"{site},{x},{y}\n" for site, x, y in ROWS)


def main() -> None:
    """Raise `subprocess.CalledProcessError` at the first command that fails."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

        def run(*words: object) -> None:
            subprocess.run(list(map(str, words)), cwd=place, env=outside, check=True)

        run(sys.executable, "-m", "build", "--outdir", place / "dist", REPOSITORY)
        for package in sorted((place / "dist").iterdir()):
            home = place / package.suffix.lstrip(".")
            venv.create(home, with_pip=True)
            python = home / "bin" / "python"
            run(python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", package)
            (place / "table.csv").write_text(TABLE, encoding="utf-8")
            fedkin = home / "bin" / "fedkin"
            run(fedkin, "--version")
            run(fedkin, "fit", "table.csv", "--site", "site", "--target", "y", "--out", home / "model")
            run(fedkin, "predict", home / "model", "table.csv", "--out", home / "predicted.csv")
            run(fedkin, "inspect", home / "model")
            assert (home / "predicted.csv").read_text(encoding="utf-8").count("\n") == TABLE.count("\n")
            print(f"{package.name}: installs, fits, predicts")


if __name__ == "__main__":
    main()
