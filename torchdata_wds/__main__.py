"""``python -m torchdata_wds``."""

from __future__ import annotations

import sys

from torchdata_wds.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
