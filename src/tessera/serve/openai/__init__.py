"""OpenAI's API: bodies, what is asked by them, and the documents that answer."""
