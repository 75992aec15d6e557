import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "bindings" / "python"), str(REPOSITORY / "benches" / "local")]
