"""Image fields."""
