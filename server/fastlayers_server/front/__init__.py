"""The front: HTTP in and out, templates, text. It talks to an engine and imports none: nor torch, nor the models."""
