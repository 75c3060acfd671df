"""``python -m torchdata_wds``."""

import sys

from torchdata_wds.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
