"""Dataset files: YAML or JSON that describes a data set."""
