"""The global order: which sample comes at which position of an epoch, and which positions a consumer reads."""
