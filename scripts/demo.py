"""`make demo`: a small GPT is trained on two nodes that lose a rank, and a node, and get it back.

Only the way in, which must not depend on what is installed; demo_main.py goes on from here.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Python puts this folder first when it runs a file in it; imports begin one above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from scripts.demo_main import main

    sys.exit(main())
