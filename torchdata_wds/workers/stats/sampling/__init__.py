"""Notes, in the process that makes items, where its time goes."""
