"""Makes the conformance graphs and the generator of random graphs importable by the tests of this folder."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / "golden"), str(TESTS / "properties"), str(TESTS / "ir")]
