"""Two embedded models, and the problems that they were trained on.

`problems.py` makes the problems. In the repository `tools/pocket_corpus.py`
writes them down sloppily, the way a web corpus would, and
`tools/pocket_train.py` trains the models from that corpus. The weights in
`weights/` are the result.
"""

from pathlib import Path

WEIGHTS_DIR = Path(__file__).parent / "weights"
"""Where the trained models lie, one folder each."""
