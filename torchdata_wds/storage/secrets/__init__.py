"""What is secret in URLs, commands and options, and how it stays out of messages and pickles."""
