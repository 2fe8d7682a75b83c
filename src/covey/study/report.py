"""Another name of `covey_tools.study.report`."""

import sys
from importlib import import_module

sys.modules[__name__] = import_module("covey_tools.study.report")
