"""Figures about a running loader: where its time goes, what holds it back, and what it stalls at."""
