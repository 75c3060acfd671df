"""Where Ray is not installed, which the extra ``test`` does, its tests are left out."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_*.py"]
