"""``python -m fedkin.cli``."""

import sys

from fedkin.cli import main

sys.exit(main())
