"""What the lessons share: data, models, training, grids, evaluation."""

import logging

# It tells that the package `kernels` is missing, through which it would
# download a CPU kernel at run time. That is code from a hub, so the package
# is left out on purpose.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

__version__ = "0.1.0"
