"""Keeps secrets in URLs, commands and options out of messages and pickles."""
