"""The probe in a folder of its own: sys.path[0] is the script's folder, not where one stands."""

import os
import sys

first = sys.path[0]
sys.path.append(os.getcwd())
import probe

sys.path.remove(os.getcwd())
probe.main(__name__, first)
