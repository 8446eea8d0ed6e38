"""What the lessons share: data, models, training, grids, evaluation."""

__version__ = "0.1.0"
