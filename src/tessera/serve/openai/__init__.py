"""OpenAI's API: request bodies, drafts, and answers."""
