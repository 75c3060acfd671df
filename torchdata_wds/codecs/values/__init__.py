"""Field types other than images and media."""
