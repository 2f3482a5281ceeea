"""Benchmarks of any server with OpenAI's API, over HTTP alone; nothing here imports torch."""
