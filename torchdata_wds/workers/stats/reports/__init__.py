"""Says what the figures of a loader mean: the verdict, its sentence, and the table."""
